"""Plain help texts and labels. The database does not change."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0006_ranked_is_an_app'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='beatjob',
            options={'verbose_name': 'periodic task'},
        ),
        migrations.AlterField(
            model_name='attempt',
            name='number',
            field=models.PositiveIntegerField(help_text='Counted over the whole life of the task, including replays.'),
        ),
        migrations.AlterField(
            model_name='attempt',
            name='status',
            field=models.TextField(choices=[('PENDING', 'PENDING'), ('IN_PROGRESS', 'IN_PROGRESS'), ('COMPLETED', 'COMPLETED'), ('FAILED', 'FAILED'), ('CANCELLED', 'CANCELLED')], help_text='The status of the task after the attempt.'),
        ),
        migrations.AlterField(
            model_name='attempt',
            name='visible_at',
            field=models.DateTimeField(help_text='When the attempt could first have been claimed.'),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='deliveries',
            field=models.PositiveIntegerField(help_text='Number of the attempt that ended it; 0 if there was no attempt.'),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='fingerprint',
            field=models.BigIntegerField(help_text='The failure id of a dead letter (queues/failure_ids.py).', null=True),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='is_dead',
            field=models.BooleanField(help_text='Out of attempts, and neither replayed nor deleted since.'),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='payload',
            field=models.TextField(blank=True, help_text='JSON text as submitted; empty if the task was deleted first.'),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='position',
            field=models.BigIntegerField(help_text='Position of the entry in the events stream. The highest position is the last end.'),
        ),
        migrations.AlterField(
            model_name='beatjob',
            name='outcome',
            field=models.TextField(blank=True, help_text='Summary of the run.'),
        ),
        migrations.AlterField(
            model_name='bulkitem',
            name='error',
            field=models.TextField(blank=True, help_text='The error code.'),
        ),
        migrations.AlterField(
            model_name='bulkitem',
            name='outcome',
            field=models.TextField(blank=True, help_text='done, skipped or failed; empty while it waits.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='actor',
            field=models.TextField(help_text='The person or token that started the job.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='canary',
            field=models.PositiveIntegerField(default=0, help_text='Tasks to replay first, to see whether they die again.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='canary_percent',
            field=models.PositiveIntegerField(default=0, help_text='Percentage of canaries that may die again; the job stops above it.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='canary_seconds',
            field=models.PositiveIntegerField(default=0, help_text='Seconds for which the canaries are watched.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='error',
            field=models.TextField(blank=True, help_text='The error that stopped the whole job.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='filter',
            field=models.TextField(blank=True, help_text='The filter that selects dead letters, as JSON; empty if the items name them.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='kind',
            field=models.TextField(choices=[('replay', 'replay'), ('delete', 'delete'), ('recall', 'undo a replay')]),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='rate_per_second',
            field=models.PositiveIntegerField(help_text='Maximum tasks per second; empty for no limit.', null=True),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='recalls',
            field=models.ForeignKey(help_text='The replay to undo.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='recalled_by', to='queues.bulkjob'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='skipped',
            field=models.BigIntegerField(default=0, help_text='Tasks that were no longer dead letters.'),
        ),
        migrations.AlterField(
            model_name='bulkjob',
            name='total',
            field=models.BigIntegerField(help_text='Tasks to handle; empty until they are counted.', null=True),
        ),
        migrations.AlterField(
            model_name='quarantine',
            name='raw',
            field=models.BinaryField(help_text="The fields, the task's spec and its result, as msgpack."),
        ),
        migrations.AlterField(
            model_name='queuepolicy',
            name='dead_letter_topic',
            field=models.TextField(blank=True, help_text='The queue that gets the tasks that are out of attempts.'),
        ),
        migrations.AlterField(
            model_name='queuepolicy',
            name='max_attempts',
            field=models.PositiveIntegerField(blank=True, help_text='Attempts of a task that sets no number.', null=True),
        ),
        migrations.AlterField(
            model_name='queuepolicy',
            name='retention_seconds',
            field=models.PositiveIntegerField(blank=True, help_text='Time for which an ended task is kept.', null=True),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='arrived',
            field=models.BigIntegerField(help_text='Tasks enqueued or replayed: the growth plus the tasks that left. Negative corrects the row before.'),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='died',
            field=models.BigIntegerField(help_text='Tasks that became dead letters.'),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='failed',
            field=models.BigIntegerField(help_text='Tasks that a worker ended with an error.'),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='returned',
            field=models.BigIntegerField(help_text='Attempts that failed and whose tasks retry.'),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='runs',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), default=list, help_text='Histogram of the time from claim to end.', size=None),
        ),
        migrations.AlterField(
            model_name='queuesample',
            name='waits',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), default=list, help_text='Histogram of the time before a claim (queues/stats/histogram.py).', size=None),
        ),
    ]
