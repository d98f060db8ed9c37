"""What a worker did, by a B-tree: inserting into the hash index cost more with every row of the worker."""

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
