"""Clearer names of fields. The columns and the data do not change.

Processes of the former release use the same columns while they run beside this one.
"""

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('webhooks', '0003_labels'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RenameField(model_name='endpoint', old_name='sealed', new_name='encrypted_secret'),
                migrations.AlterField(
                    model_name='endpoint',
                    name='encrypted_secret',
                    field=models.TextField(blank=True, db_column='sealed', editable=False),
                ),
                migrations.RenameField(
                    model_name='endpoint', old_name='former_sealed', new_name='previous_encrypted_secret'
                ),
                migrations.AlterField(
                    model_name='endpoint',
                    name='previous_encrypted_secret',
                    field=models.TextField(blank=True, db_column='former_sealed', editable=False),
                ),
                migrations.RenameField(
                    model_name='endpoint', old_name='former_until', new_name='previous_secret_expires_at'
                ),
                migrations.AlterField(
                    model_name='endpoint',
                    name='previous_secret_expires_at',
                    field=models.DateTimeField(db_column='former_until', editable=False, null=True),
                ),
                migrations.RenameField(model_name='delivery', old_name='tries', new_name='attempts_since_replay'),
                migrations.AlterField(
                    model_name='delivery',
                    name='attempts_since_replay',
                    field=models.PositiveIntegerField(
                        db_column='tries', default=0, help_text='Attempts since the delivery was created or replayed.'
                    ),
                ),
                migrations.RemoveIndex(model_name='subscription', name='subscription_owed'),
                migrations.RenameField(model_name='subscription', old_name='owed', new_name='deferred_commands'),
                migrations.AlterField(
                    model_name='subscription',
                    name='deferred_commands',
                    field=django.contrib.postgres.fields.ArrayField(
                        base_field=models.TextField(), blank=True, db_column='owed', default=list, editable=False,
                        size=None,
                    ),
                ),
                migrations.AddIndex(
                    model_name='subscription',
                    index=models.Index(
                        condition=models.Q(('deferred_commands', []), _negated=True), fields=['notified_at'],
                        name='subscription_owed',
                    ),
                ),
            ],
        ),
    ]
