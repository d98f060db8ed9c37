{{- define "codeq.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels of a component: (list $ "web"). The first three are the selector. */}}
{{- define "codeq.selector" -}}
app.kubernetes.io/name: codeq
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "codeq.labels" -}}
{{ include "codeq.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "codeq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The settings of every process. URLs and keys are in the Secret. */}}
{{- define "codeq.env" -}}
- {name: CODEQ_PRODUCTION, value: "true"}
- {name: CODEQ_LOG_FORMAT, value: json}
- {name: CODEQ_ALLOWED_HOSTS, value: {{ .Values.host | quote }}}
- {name: CODEQ_ARTIFACTS, value: {{ .Values.artifacts | quote }}}
{{- if .Values.pipeline.enabled }}
- {name: CODEQ_PIPELINE_LAKE, value: {{ .Values.pipeline.lake | quote }}}
{{- end }}
{{- range $name, $value := .Values.env }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- range tuple "REDIS_URL" "CELERY_BROKER_URL" "DATABASE_URL" "SECRET_KEY" }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.existingSecret }}, key: {{ . }}}}
{{- end }}
{{- end }}

{{- define "codeq.envFrom" -}}
- secretRef: {name: {{ .Values.existingSecret }}}
{{- end }}

{{/* The parts that all pods share: (list $ "web"). */}}
{{- define "codeq.pod" -}}
{{- $root := index . 0 -}}
automountServiceAccountToken: false
{{- with $root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "codeq.selector" . | nindent 8 }}
volumes:
  - {name: home, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
{{- if $root.Values.ca.configMap }}
  - {name: ca, configMap: {name: {{ $root.Values.ca.configMap }}}}
{{- else if $root.Values.ca.secret }}
  - {name: ca, secret: {secretName: {{ $root.Values.ca.secret }}}}
{{- end }}
{{- end }}

{{/* The parts that all containers share. */}}
{{- define "codeq.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
envFrom: {{ include "codeq.envFrom" . | nindent 2 }}
volumeMounts:
  - {name: home, mountPath: /var/lib/codeq}
  - {name: tmp, mountPath: /tmp}
{{- if or .Values.ca.configMap .Values.ca.secret }}
  - {name: ca, mountPath: /etc/codeq/ca, readOnly: true}
{{- end }}
{{- end }}

{{/* Probes of a web process. /readyz is for alerts: the API continues without PostgreSQL, while no pod is ready there. */}}
{{- define "codeq.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 1
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
