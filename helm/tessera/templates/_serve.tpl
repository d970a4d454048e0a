{{/* The Serve configuration: what service.app:build is called with, and where its replicas may run. */}}

{{- define "tessera.serveConfig" -}}
proxy_location: {{ ternary "Disabled" "EveryNode" (eq .Values.http.proxy "direct") }}
http_options:
  host: {{ .Values.bindAddress | quote }}
  port: {{ int .Values.http.port }}
  keep_alive_timeout_s: {{ int .Values.http.keepAliveTimeoutSeconds }}
applications:
{{- range (include "tessera.groups" . | fromJson).groups }}
  - name: {{ .name }}
    route_prefix: {{ ternary (printf "/%s" .name) "/" (gt (len $.Values.engineGroups) 1) }}
    import_path: service.app:build
    args:
      {{- include "tessera.arguments" (dict "root" $ "group" .) | nindent 6 }}
    deployments:
      {{- include "tessera.deployments" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* ServeConfig of one group. What the chart decides is not in `config` (the schema refuses it there). */}}
{{- define "tessera.arguments" -}}
{{- $values := .root.Values -}}
{{- $group := .group -}}
{{- $host := $values.bindAddress -}}
{{- $owned := dict
  "app_name" $group.name
  "drain_timeout_s" (int $values.drainTimeoutSeconds)
  "http" (dict "host" $host "port" (int $values.http.port) "proxy" $values.http.proxy
    "keep_alive_timeout_s" (int $values.http.keepAliveTimeoutSeconds))
  "grpc" (dict "host" $host "port" (int $values.grpc.port))
  "metrics" (dict "host" $host "port" (int $group.metricsPort))
  "channel" (dict "transport" "unix+tcp")
  "engine" (dict "model" $group.modelPath "tp_size" (int $group.tpSize)
    "device" (ternary "cuda" "cpu" (gt (int $group.gpusPerRank) 0)))
  "replica" (dict "cpus_per_rank" $group.cpusPerRank "gpus_per_rank" (int $group.gpusPerRank))
-}}
{{- if $values.auth.existingSecret -}}
{{- $_ := set $owned "auth" (dict "api_key_file" "/etc/tessera/auth/api-keys") -}}
{{- end -}}
{{- $config := mergeOverwrite (deepCopy $values.config) (deepCopy $group.config) $owned -}}
{{ toYaml $config }}
{{- end -}}

{{/* build_app's own options, and the resource that keeps each replica on the pods of its group. Counts are here
     and not among the arguments, because changed arguments restart every replica. */}}
{{- define "tessera.deployments" -}}
{{- $bundle := dict "CPU" .cpusPerRank (include "tessera.resource" (dict "role" "engine" "group" .name)) 1 -}}
{{- if gt (int .gpusPerRank) 0 -}}
{{- $_ := set $bundle "GPU" (int .gpusPerRank) -}}
{{- end -}}
- name: Engine
  num_replicas: {{ int .replicas }}
  ray_actor_options:
    num_cpus: {{ .cpusPerRank }}
    num_gpus: {{ int .gpusPerRank }}
    resources:
      {{ include "tessera.resource" (dict "role" "engine" "group" .name) }}: 1
  {{- if gt (int .tpSize) 1 }}
  placement_group_strategy: STRICT_PACK
  placement_group_bundles:
    {{- range until (int .tpSize) }}
    - {{ toJson $bundle }}
    {{- end }}
  {{- end }}
- name: Ingress
  num_replicas: {{ int .ingress.replicas }}
  ray_actor_options:
    num_cpus: 0
    resources:
      {{ include "tessera.resource" (dict "role" "ingress" "group" .name) }}: 1
{{- end -}}
