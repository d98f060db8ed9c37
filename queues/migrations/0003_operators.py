"""Dead letters by failure, words to search by, bulk jobs, and policies of queues."""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.contrib.postgres.search
import django.db.models.deletion
from django.db import migrations, models

FORWARDS = r"""
-- Returns the words by which a search finds a row, and `@<tid>`, which restricts the search to a tenant: no word of a text
-- begins with `@`. Only the beginning of a long text is searched. The parser of PostgreSQL would keep addresses, paths,
-- versions and tags as one word, so the characters that join their parts are replaced by spaces. So are line breaks and
-- tabs, which JSON writes as two characters. This runs for every row of the audit. One `replace` costs 0.4 µs for 1,000
-- characters, `translate` 110 µs.
CREATE FUNCTION queues_words(tid text, worker text, error text, payload text) RETURNS tsvector
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT pg_catalog.array_to_tsvector(ARRAY['@' || coalesce(tid, '')]) || pg_catalog.to_tsvector(
        'pg_catalog.simple',
        replace(replace(replace(replace(replace(replace(replace(
        replace(replace(replace(replace(replace(replace(replace(
            pg_catalog.left(worker, 200) || ' ' || pg_catalog.left(error, 1000) || ' '
                || replace(replace(pg_catalog.left(payload, 1000), '\n', ' '), '\t', ' '),
            '-', ' '), '_', ' '), '.', ' '), '/', ' '), '@', ' '), ':', ' '), '=', ' '),
            '&', ' '), '?', ' '), '%', ' '), '+', ' '), '#', ' '), '<', ' '), '~', ' ')
    )
$$;

-- Returns whether a JSON path finds a value other than false and null in a payload. jsonb refuses some JSON (`\u0000`,
-- 1e400). The function returns false for such a payload; a cast in the query would end the query with an error.
CREATE FUNCTION queues_finds(payload text, path jsonpath) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM jsonb_path_query(payload::jsonb, path, '{}', true) AS item (value)
        WHERE value NOT IN ('false', 'null')
    );
EXCEPTION WHEN data_exception OR program_limit_exceeded OR character_not_in_repertoire THEN
    RETURN false;
END $$;

-- A change of a policy changes the tenant's row too, because TenantCache (tenants/cache.py) polls the rows of tenants.
CREATE FUNCTION queues_policy_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE tenants_tenant SET version = version WHERE tid = OLD.tenant_id;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE tenants_tenant SET version = version WHERE tid = NEW.tenant_id;
    END IF;
    RETURN NULL;
END $$;
"""

BACKWARDS = """
DROP FUNCTION queues_words(text, text, text, text);
DROP FUNCTION queues_finds(text, jsonpath);
DROP FUNCTION queues_policy_changed();
"""

TRIGGER = """
CREATE TRIGGER policy_changed AFTER INSERT OR UPDATE OR DELETE ON queues_queuepolicy
    FOR EACH ROW EXECUTE FUNCTION queues_policy_changed();
"""


class Migration(migrations.Migration):

    dependencies = [
        ('queues', '0002_depth_samples'),
        ('tenants', '0002_follow_changes'),
    ]

    operations = [
        migrations.RunSQL(FORWARDS, BACKWARDS),
        migrations.CreateModel(
            name='BulkItem',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('task_id', models.UUIDField()),
                ('outcome', models.TextField(blank=True, help_text='done, skipped or failed; empty: not yet.')),
                ('error', models.TextField(blank=True, help_text='The code of what was wrong.')),
                ('is_canary', models.BooleanField(default=False)),
            ],
            options={
                'verbose_name': 'item of a bulk job',
            },
        ),
        migrations.CreateModel(
            name='BulkJob',
            fields=[
                ('id', models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ('kind', models.TextField(choices=[('replay', 'replay'), ('delete', 'delete'), ('recall', 'take back a replay')])),
                ('state', models.TextField(choices=[('running', 'running'), ('watching', 'watching the canaries'), ('done', 'done'), ('stopped', 'stopped: too many canaries died'), ('cancelling', 'cancelling'), ('cancelled', 'cancelled'), ('failed', 'failed')], default='running')),
                ('filter', models.TextField(blank=True, help_text='Which dead letters, as JSON; empty: those named one by one.')),
                ('actor', models.TextField(help_text='Who asked for it.')),
                ('reason', models.TextField(blank=True)),
                ('rate_per_second', models.PositiveIntegerField(help_text='No faster than this; empty: as fast as it goes.', null=True)),
                ('canary', models.PositiveIntegerField(default=0, help_text='So many first, and then a look at what became of them.')),
                ('canary_percent', models.PositiveIntegerField(default=0, help_text='The most of them that may die again, in per cent.')),
                ('canary_seconds', models.PositiveIntegerField(default=0, help_text='How long they are watched.')),
                ('canaries_died', models.PositiveIntegerField(null=True)),
                ('watched_until', models.DateTimeField(null=True)),
                ('total', models.BigIntegerField(help_text='How many there are to do; empty until they are counted.', null=True)),
                ('done', models.BigIntegerField(default=0)),
                ('skipped', models.BigIntegerField(default=0, help_text='Not a dead letter any more when its turn came.')),
                ('failed', models.BigIntegerField(default=0)),
                ('error', models.TextField(blank=True, help_text='Why the job as a whole could not go on.')),
                ('before', models.DateTimeField()),
                ('sending', django.contrib.postgres.fields.ArrayField(base_field=models.UUIDField(), default=list, size=None)),
                ('piece', models.BigIntegerField(default=0)),
                ('after_ended_at', models.DateTimeField(null=True)),
                ('after_task_id', models.UUIDField(null=True)),
                ('created_at', models.DateTimeField()),
                ('started_at', models.DateTimeField(null=True)),
                ('sent_at', models.DateTimeField(null=True)),
                ('ended_at', models.DateTimeField(null=True)),
            ],
            options={
                'verbose_name': 'bulk job',
                'get_latest_by': 'created_at',
            },
        ),
        migrations.CreateModel(
            name='QueuePolicy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('command', models.TextField()),
                ('max_attempts', models.PositiveIntegerField(blank=True, help_text='Deliveries of a task that names none.', null=True)),
                ('priority_tiers', django.contrib.postgres.fields.ArrayField(base_field=models.PositiveSmallIntegerField(), blank=True, help_text='The priorities a task may have.', null=True, size=None)),
                ('retention_seconds', models.PositiveIntegerField(blank=True, help_text='How long an ended task stays.', null=True)),
                ('max_consumers', models.PositiveIntegerField(blank=True, help_text='Tasks that may be in progress at once.', null=True)),
                ('dead_letter_topic', models.TextField(blank=True, help_text='The queue that takes tasks which are out of attempts.')),
                ('backoff', models.TextField(blank=True, choices=[('fixed', 'fixed'), ('linear', 'linear'), ('exponential', 'exponential'), ('exp_full_jitter', 'exp_full_jitter'), ('exp_equal_jitter', 'exp_equal_jitter')])),
                ('backoff_base_seconds', models.FloatField(blank=True, null=True)),
                ('backoff_cap_seconds', models.FloatField(blank=True, null=True)),
                ('version', models.PositiveIntegerField(default=1)),
                ('changed_by', models.TextField(blank=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('updated_at', models.DateTimeField(auto_now=True)),
            ],
            options={
                'verbose_name': 'queue policy',
                'verbose_name_plural': 'queue policies',
            },
        ),
        migrations.AddField(
            model_name='auditedresult',
            name='fingerprint',
            field=models.BigIntegerField(help_text='Of a dead letter: which failure it is, as a number (queues.deadletters.failure_groups).', null=True),
        ),
        migrations.AlterField(
            model_name='auditedresult',
            name='is_dead',
            field=models.BooleanField(help_text='A dead letter: out of attempts, neither replayed nor deleted since.'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(fields=['tenant', 'command', 'ended_at'], name='audited_command_ended'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(condition=models.Q(('status', 'COMPLETED'), _negated=True), fields=['tenant', 'ended_at'], name='audited_not_completed'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(condition=models.Q(('is_dead', True)), fields=['ended_at'], name='audited_dead_all'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(condition=models.Q(('is_dead', True)), fields=['tenant', 'ended_at'], name='audited_dead_tenant'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=models.Index(condition=models.Q(('is_dead', True)), fields=['tenant', 'command', 'fingerprint', 'ended_at'], name='audited_dead_failure'),
        ),
        migrations.AddIndex(
            model_name='auditedresult',
            index=django.contrib.postgres.indexes.GinIndex(models.Func(models.F('tenant'), models.F('worker'), models.F('error'), models.F('payload'), function='queues_words', output_field=django.contrib.postgres.search.SearchVectorField()), name='audited_words'),
        ),
        migrations.AddField(
            model_name='bulkjob',
            name='recalls',
            field=models.ForeignKey(help_text='The replay to take back.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='recalled_by', to='queues.bulkjob'),
        ),
        migrations.AddField(
            model_name='bulkjob',
            name='tenant',
            field=models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='tenants.tenant'),
        ),
        migrations.AddField(
            model_name='bulkitem',
            name='job',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='items', to='queues.bulkjob'),
        ),
        migrations.AddField(
            model_name='queuepolicy',
            name='tenant',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='tenants.tenant'),
        ),
        migrations.AddIndex(
            model_name='bulkjob',
            index=models.Index(fields=['tenant', 'created_at'], name='bulk_tenant_created'),
        ),
        migrations.AddIndex(
            model_name='bulkjob',
            index=models.Index(condition=models.Q(('ended_at', None)), fields=['created_at'], name='bulk_unfinished'),
        ),
        migrations.AddIndex(
            model_name='bulkitem',
            index=models.Index(condition=models.Q(('outcome', '')), fields=['job', 'id'], name='bulk_item_waiting'),
        ),
        migrations.AddConstraint(
            model_name='bulkitem',
            constraint=models.UniqueConstraint(fields=('job', 'task_id'), name='once_in_a_job'),
        ),
        migrations.AddConstraint(
            model_name='queuepolicy',
            constraint=models.UniqueConstraint(fields=('tenant', 'command'), name='one_policy_of_a_queue'),
        ),
        migrations.RunSQL(TRIGGER, "DROP TRIGGER policy_changed ON queues_queuepolicy"),
    ]
