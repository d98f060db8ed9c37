"""Take RankedEntry over from the queues app: the table and its rows stay as they are."""

import django.db.models.deletion
from django.db import migrations, models


def move_content_type(apps, schema_editor):
    """Keep the content type, so that the permissions and the operator history of the model stay valid."""
    content_types = apps.get_model("contenttypes", "ContentType").objects
    if not content_types.filter(app_label="ranked", model="rankedentry").exists():
        content_types.filter(app_label="queues", model="rankedentry").update(app_label="ranked")


def move_content_type_back(apps, schema_editor):
    content_types = apps.get_model("contenttypes", "ContentType").objects
    if not content_types.filter(app_label="queues", model="rankedentry").exists():
        content_types.filter(app_label="ranked", model="rankedentry").update(app_label="queues")


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('queues', '0006_ranked_is_an_app'),
        ('tenants', '0002_follow_changes'),
        ('contenttypes', '0002_remove_content_type_name'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
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
                        'db_table': 'queues_rankedentry',
                        'verbose_name_plural': 'ranked entries',
                    },
                ),
            ],
        ),
        migrations.RunPython(move_content_type, move_content_type_back),
    ]
