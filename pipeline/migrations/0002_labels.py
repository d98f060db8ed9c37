"""Clearer labels. The database does not change."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('pipeline', '0001_initial'),
    ]

    operations = [
        migrations.AlterField(
            model_name='webhookhealth',
            name='refused',
            field=models.BigIntegerField(help_text='Attempts answered with a status other than 2xx.', verbose_name='rejected'),
        ),
    ]
