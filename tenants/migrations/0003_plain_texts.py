"""Plain help texts and labels. The database does not change."""

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0002_follow_changes'),
    ]

    operations = [
        migrations.AlterField(
            model_name='signingsecret',
            name='hint',
            field=models.CharField(editable=False, help_text='Last characters of the secret, to identify it.', max_length=4),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='admin_per_second',
            field=models.FloatField(blank=True, help_text='Maximum admin requests per second; 0 = no limit.', null=True, validators=[django.core.validators.MinValueValidator(0)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='claim_per_second',
            field=models.FloatField(blank=True, help_text='Maximum claims per second; 0 = no limit.', null=True, validators=[django.core.validators.MinValueValidator(0)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='create_per_second',
            field=models.FloatField(blank=True, help_text='Maximum tasks created per second; 0 = no limit.', null=True, validators=[django.core.validators.MinValueValidator(0)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='dead_retention_seconds',
            field=models.PositiveIntegerField(blank=True, help_text='How long a dead letter is kept.', null=True, validators=[django.core.validators.MinValueValidator(60)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='depth',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum number of waiting tasks in all queues; 0 = no limit.', null=True),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='is_idempotency_strict',
            field=models.BooleanField(blank=True, help_text='Refuse a repeated idempotency key with another body (409).', null=True),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='is_lease_token_required',
            field=models.BooleanField(blank=True, help_text='Heartbeat, result, nack and abandon require the lease token.', null=True),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='payload_bytes',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum payload size of a task.', null=True, validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='result_bytes',
            field=models.PositiveIntegerField(blank=True, help_text='Maximum result size of a task.', null=True, validators=[django.core.validators.MinValueValidator(1)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='retention_seconds',
            field=models.PositiveIntegerField(blank=True, help_text='How long the live data of an ended task is kept.', null=True, validators=[django.core.validators.MinValueValidator(60)]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='slug',
            field=models.CharField(help_text='The value of the tenant claim in tokens.', max_length=128, unique=True, validators=[django.core.validators.RegexValidator('^[A-Za-z0-9_.:@|/+=-]{1,128}\\Z', 'Use 1 to 128 letters, digits and the characters _.:@|/+=-.')]),
        ),
        migrations.AlterField(
            model_name='tenant',
            name='webhook_per_second',
            field=models.FloatField(blank=True, help_text='Maximum callbacks sent per second; 0 = no limit.', null=True, validators=[django.core.validators.MinValueValidator(0)]),
        ),
        migrations.AlterField(
            model_name='tenantissuer',
            name='issuer',
            field=models.CharField(help_text='The `iss` claim of its tokens.', max_length=255),
        ),
        migrations.AlterField(
            model_name='tenantissuer',
            name='jwks',
            field=models.JSONField(blank=True, help_text='Its public keys, instead of a URL: {"keys": […]}.', null=True, verbose_name='JWKS'),
        ),
        migrations.AlterField(
            model_name='tenantissuer',
            name='jwks_url',
            field=models.CharField(blank=True, help_text='URL of its public keys.', max_length=500, verbose_name='JWKS URL'),
        ),
        migrations.AlterField(
            model_name='tenantissuer',
            name='producer_audience',
            field=models.CharField(blank=True, help_text="The `aud` claim of its producers' tokens. Empty: installation default.", max_length=255),
        ),
        migrations.AlterField(
            model_name='tenantissuer',
            name='worker_audience',
            field=models.CharField(blank=True, help_text="The `aud` claim of its workers' tokens. Empty: installation default.", max_length=255),
        ),
        migrations.AlterField(
            model_name='tenantmembership',
            name='role',
            field=models.CharField(choices=[('viewer', 'viewer: read only'), ('operator', 'operator: read and act on tasks'), ('admin', 'admin: also manage issuers and secrets')], default='viewer', max_length=10),
        ),
    ]
