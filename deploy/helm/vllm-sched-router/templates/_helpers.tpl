{{/* The labels of an object or pod; needs the context and a component. */}}
{{- define "labels" -}}
app.kubernetes.io/name: vllm-sched
app.kubernetes.io/part-of: vllm-sched
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end -}}

{{- define "selector" -}}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end -}}

{{- define "podLabels" -}}
{{ include "labels" . }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The securityContext of every container. */}}
{{- define "restricted" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end -}}

{{/* Whether routers use a server: the chart's or another; needs the context and the server's name. */}}
{{- define "uses" -}}
{{- $name := index . 1 -}}
{{- $server := index (index . 0).Values $name -}}
{{- if and $server.enabled $server.url -}}
{{-   fail (printf "%s: give enabled or url, not both" $name) -}}
{{- end -}}
{{- if and $server.enabled (not $server.existingSecret) -}}
{{-   fail (printf "%s.existingSecret: the chart's server needs a password" $name) -}}
{{- end -}}
{{ if or $server.enabled $server.url }}true{{ end }}
{{- end -}}

{{/* The fleet file with the servers of the chart. What the values' fleet says of them is kept. */}}
{{- define "fleet" -}}
{{- $fleet := deepCopy .Values.fleet -}}
{{- if include "uses" (list . "redis") -}}
{{-   $own := default dict $fleet.router.shared -}}
{{-   $url := default (printf "redis://%s-redis:6379" .Release.Name) .Values.redis.url -}}
{{-   $shared := dict "url" $url "replicas" (int .Values.replicas) -}}
{{-   if .Values.redis.existingSecret -}}
{{-     $_ := set $shared "password_file" "/etc/vllm-sched-redis/password" -}}
{{-   end -}}
{{-   $_ := set $fleet.router "shared" (merge $own $shared) -}}
{{- end -}}
{{- if include "uses" (list . "postgres") -}}
{{-   $own := default dict $fleet.router.batches -}}
{{-   $url := default (printf "postgresql://router@%s-postgres/router" .Release.Name) .Values.postgres.url -}}
{{-   $batches := dict "database" $url -}}
{{-   if .Values.postgres.existingSecret -}}
{{-     $_ := set $batches "database_password_file" "/etc/vllm-sched-postgres/password" -}}
{{-   end -}}
{{-   $_ := set $fleet.router "batches" (merge $own $batches) -}}
{{- end -}}
{{ toYaml $fleet }}
{{- end -}}
