"""The table of entries that ranked queues have not stored in Redis yet."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0004_index_of_workers'),
        ('tenants', '0002_follow_changes'),
    ]

    operations = [
        migrations.CreateModel(
            name='RankedEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('queue', models.TextField()),
                ('task_id', models.TextField()),
                ('rank', models.PositiveSmallIntegerField()),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('tenant', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='tenants.tenant')),
            ],
            options={
                'verbose_name_plural': 'ranked entries',
            },
        ),
    ]
