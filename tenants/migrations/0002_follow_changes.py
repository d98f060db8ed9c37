"""Triggers that number every change of a tenant or its issuers, including changes in SQL, for `TenantCache`."""

from django.db import migrations

FORWARDS = """
CREATE FUNCTION tenants_number_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.changed := pg_current_xact_id()::text::bigint;
    -- The row is locked, so a later change gets a greater number, whichever transaction began first.
    NEW.version := CASE TG_OP WHEN 'UPDATE' THEN OLD.version + 1 ELSE 1 END;
    RETURN NEW;
END $$;

CREATE TRIGGER number_change BEFORE INSERT OR UPDATE ON tenants_tenant
    FOR EACH ROW EXECUTE FUNCTION tenants_number_change();

CREATE FUNCTION tenants_issuer_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE tenants_tenant SET version = version WHERE tid = OLD.tenant_id;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE tenants_tenant SET version = version WHERE tid = NEW.tenant_id;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER issuer_changed AFTER INSERT OR UPDATE OR DELETE ON tenants_tenantissuer
    FOR EACH ROW EXECUTE FUNCTION tenants_issuer_changed();
"""

BACKWARDS = """
DROP TRIGGER issuer_changed ON tenants_tenantissuer;
DROP FUNCTION tenants_issuer_changed();
DROP TRIGGER number_change ON tenants_tenant;
DROP FUNCTION tenants_number_change();
"""


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial")]

    operations = [migrations.RunSQL(FORWARDS, BACKWARDS)]
