"""Leave RankedEntry to the ranked app. Only the state changes: the table stays."""

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0005_ranked'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel(name='RankedEntry')]),
    ]
