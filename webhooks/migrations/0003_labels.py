"""Clearer labels. The database does not change."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('webhooks', '0002_plain_texts'),
    ]

    operations = [
        migrations.AlterField(
            model_name='delivery',
            name='url',
            field=models.TextField(verbose_name='URL'),
        ),
        migrations.AlterField(
            model_name='subscription',
            name='callback_url',
            field=models.TextField(verbose_name='callback URL'),
        ),
    ]
