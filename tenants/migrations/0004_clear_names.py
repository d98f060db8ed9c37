"""Give fields clearer names, and name the units in help texts. The columns and the data do not change.

Processes of the former release use the same columns while they run beside this one.
"""

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0003_plain_texts'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RenameField(model_name='tenant', old_name='changed', new_name='changed_in_transaction'),
                migrations.AlterField(
                    model_name='tenant',
                    name='changed_in_transaction',
                    field=models.BigIntegerField(db_column='changed', db_index=True, default=0, editable=False),
                ),
                migrations.RenameField(model_name='signingsecret', old_name='sealed', new_name='encrypted_secret'),
                migrations.AlterField(
                    model_name='signingsecret',
                    name='encrypted_secret',
                    field=models.TextField(db_column='sealed', editable=False),
                ),
                migrations.RenameField(
                    model_name='installationkey', old_name='sealed', new_name='encrypted_private_key'
                ),
                migrations.AlterField(
                    model_name='installationkey',
                    name='encrypted_private_key',
                    field=models.TextField(db_column='sealed', editable=False),
                ),
                migrations.AlterField(
                    model_name='tenant',
                    name='dead_retention_seconds',
                    field=models.PositiveIntegerField(
                        blank=True, help_text='Seconds for which a dead letter stays in Redis.', null=True,
                        validators=[django.core.validators.MinValueValidator(60)],
                    ),
                ),
                migrations.AlterField(
                    model_name='tenant',
                    name='payload_bytes',
                    field=models.PositiveIntegerField(
                        blank=True, help_text='Maximum payload size of a task, in bytes.', null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                migrations.AlterField(
                    model_name='tenant',
                    name='result_bytes',
                    field=models.PositiveIntegerField(
                        blank=True, help_text='Maximum result size of a task, in bytes.', null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                migrations.AlterField(
                    model_name='tenant',
                    name='retention_seconds',
                    field=models.PositiveIntegerField(
                        blank=True, help_text='Seconds for which an ended task stays in Redis.', null=True,
                        validators=[django.core.validators.MinValueValidator(60)],
                    ),
                ),
            ],
        ),
    ]
