"""Index attempts by worker with a B-tree: inserting into a hash index became slower with every row of a worker."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0003_operators'),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='auditedresult',
            name='audited_worker',
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(fields=['worker', 'ended_at'], name='audited_worker'),
        ),
        migrations.AddIndex(
            model_name='attempt',
            index=models.Index(fields=['worker', 'ended_at'], name='attempt_worker'),
        ),
    ]
