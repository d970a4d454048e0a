{{/* The Serve configuration: what service.app:build is called with, and where its replicas may run. */}}

{{- define "tessera.serveConfig" -}}
proxy_location: {{ ternary "Disabled" "EveryNode" (eq .Values.http.proxy "direct") }}
http_options:
  host: {{ .Values.bindAddress | quote }}
  port: {{ int .Values.http.port }}
  keep_alive_timeout_s: {{ int .Values.http.keepAliveTimeoutSeconds }}
applications:
{{- range (include "tessera.groups" . | fromJson).served }}
  - name: {{ .name }}
    {{- /* Proxies serve one group only. Without them it leads nowhere, and must not depend on other groups. */}}
    route_prefix: {{ ternary (printf "/%s" .name) "/" (eq $.Values.http.proxy "direct") }}
    import_path: service.app:build
    args:
      {{- include "tessera.arguments" (dict "root" $ "group" .) | nindent 6 }}
    deployments:
      {{- include "tessera.deployments" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* ServeConfig of one group. What the chart decides is not in `config` (the schema refuses it there). */}}
{{- define "tessera.arguments" -}}
{{- $root := .root -}}
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
{{- if and (ne $values.weights.nodeCache.type "none") (hasPrefix (printf "%s/" $values.weights.mountPath) $group.modelPath) -}}
{{- $_ := set $owned.engine "weights_cache_dir" (include "tessera.nodeCachePath" $root) -}}
{{- $_ := set $owned.engine "weights_cache_bytes" (int $values.weights.nodeCache.maxBytes) -}}
{{- end -}}
{{- range $protocol := list "http" "grpc" -}}
{{- with (get $values $protocol).tls -}}
{{- if .existingSecret -}}
{{- $folder := printf "/etc/tessera/%s-tls" $protocol -}}
{{- $tls := dict "certificate_file" (printf "%s/tls.crt" $folder) "key_file" (printf "%s/tls.key" $folder) -}}
{{- if .clientAuthoritiesKey -}}
{{- $_ := set $tls "client_ca_file" (printf "%s/clients.crt" $folder) -}}
{{- end -}}
{{- $_ := set (get $owned $protocol) "tls" $tls -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $auth := dict -}}
{{- if $values.auth.existingSecret -}}
{{- $_ := set $auth "api_key_file" "/etc/tessera/auth/api-keys" -}}
{{- end -}}
{{- if $values.auth.adminExistingSecret -}}
{{- $_ := set $auth "admin_api_key_file" "/etc/tessera/admin/api-keys" -}}
{{- end -}}
{{- if $auth -}}
{{- $_ := set $owned "auth" $auth -}}
{{- end -}}
{{- $config := mergeOverwrite (deepCopy $values.config) (deepCopy $group.config) $owned -}}
{{ toYaml $config }}
{{- end -}}

{{/* How many engine replicas: what service/autoscaling/serve_options.py tells Serve. */}}
{{- define "tessera.serveScaling" -}}
{{- with .group.autoscaling -}}
{{- if .enabled -}}
{{- $engine := (mergeOverwrite (deepCopy $.root.Values.config) (deepCopy $.group.config)).engine | default dict -}}
autoscaling_config:
  min_replicas: {{ int .minReplicas }}
  max_replicas: {{ int .maxReplicas }}
  upscale_delay_s: {{ int .upscaleDelaySeconds }}
  downscale_delay_s: {{ int .downscaleDelaySeconds }}
  downscale_to_zero_delay_s: {{ int .scaleToZeroAfterSeconds }}
  policy:
    policy_function: service.autoscaling.serve_policy:EngineScalingPolicy
    policy_kwargs:
      app_name: {{ $.group.name }}
      model: {{ $.group.modelPath | quote }}
      served_name: {{ $.group.servedName | quote }}
      target_queued_tokens: {{ int .targetQueuedTokens }}
      target_kv_usage: {{ .targetKvUsage }}
      target_requests: {{ int .targetRequests | default (int ($engine.max_running_requests | default 256)) }}
{{- else -}}
num_replicas: {{ int $.group.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* build_app's own options, and the resource that keeps each replica on the pods of its group. Counts are here
     and not among the arguments, because changed arguments restart every replica. */}}
{{- define "tessera.deployments" -}}
{{- $bundle := dict "CPU" .cpusPerRank (include "tessera.resource" (dict "role" "engine" "group" .name)) 1 -}}
{{- if gt (int .gpusPerRank) 0 -}}
{{- $_ := set $bundle "GPU" (int .gpusPerRank) -}}
{{- end -}}
- name: Engine
  {{- toYaml .serveScaling | nindent 2 }}
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
