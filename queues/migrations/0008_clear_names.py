"""Clearer names of a model and a field, and clearer help texts. The table, the column and the data do not change.

Processes of the former release use the same table and column while they run beside this one.
"""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0007_plain_texts'),
    ]

    operations = [
        # With the name of the table set, the renaming of the model is no SQL. It is not inside SeparateDatabaseAndState,
        # so that Django also renames the content type, to which the entries of the admin's history refer.
        migrations.AlterModelTable(name='beatjob', table='queues_beatjob'),
        migrations.RenameModel(old_name='BeatJob', new_name='PeriodicTaskRun'),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RenameField(model_name='bulkjob', old_name='piece', new_name='batch_number'),
                migrations.AlterField(
                    model_name='bulkjob',
                    name='batch_number',
                    field=models.BigIntegerField(db_column='piece', default=0),
                ),
                migrations.AlterField(
                    model_name='bulkjob',
                    name='recalls',
                    field=models.ForeignKey(
                        help_text='The replay to undo.', null=True, on_delete=django.db.models.deletion.CASCADE,
                        related_name='undo_jobs', to='queues.bulkjob',
                    ),
                ),
                migrations.AlterField(
                    model_name='auditedresult',
                    name='attempts',
                    field=models.PositiveIntegerField(
                        help_text='Failed attempts since the task was enqueued or last replayed.'
                    ),
                ),
                migrations.AlterField(
                    model_name='queuesample',
                    name='arrived',
                    field=models.BigIntegerField(
                        help_text='Tasks enqueued or replayed: the growth plus the tasks that left. A negative number '
                        'corrects the previous row.'
                    ),
                ),
                migrations.AlterField(
                    model_name='queuesample',
                    name='returned',
                    field=models.BigIntegerField(help_text='Failed attempts after which the task is retried.'),
                ),
            ],
        ),
    ]
