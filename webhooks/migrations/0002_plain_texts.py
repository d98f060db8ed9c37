"""Plain help texts and labels. The database does not change."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('webhooks', '0001_initial'),
    ]

    operations = [
        migrations.AlterField(
            model_name='circuit',
            name='failures',
            field=models.PositiveIntegerField(help_text='Consecutive failures.'),
        ),
        migrations.AlterField(
            model_name='delivery',
            name='address',
            field=models.TextField(help_text='The URL without its query string, which identifies the endpoint.'),
        ),
        migrations.AlterField(
            model_name='delivery',
            name='attempts',
            field=models.PositiveIntegerField(default=0, help_text='Attempts in total.'),
        ),
        migrations.AlterField(
            model_name='delivery',
            name='due_at',
            field=models.DateTimeField(help_text='Time of the next attempt. During an attempt: when its reservation expires.'),
        ),
        migrations.AlterField(
            model_name='delivery',
            name='host',
            field=models.TextField(help_text='Host and port, the unit of circuits and slots.'),
        ),
        migrations.AlterField(
            model_name='delivery',
            name='tries',
            field=models.PositiveIntegerField(default=0, help_text='Attempts since the delivery was created or replayed.'),
        ),
        migrations.AlterField(
            model_name='deliveryattempt',
            name='answer',
            field=models.TextField(blank=True, help_text='First 2 KiB of the response body.'),
        ),
        migrations.AlterField(
            model_name='endpoint',
            name='address',
            field=models.TextField(help_text='The URL without its query string.'),
        ),
        migrations.AlterField(
            model_name='subscription',
            name='mode',
            field=models.TextField(choices=[('fanout', 'fanout: every subscriber'), ('group', 'group: one subscriber of each group in turn'), ('hash', 'hash: always the same subscriber for a queue')], default='fanout'),
        ),
    ]
