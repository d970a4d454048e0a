{{/* Pods of a RayCluster. Called with root, role (head, engine, ingress), pod (the values of this pod: resources,
     nodeSelector, ...) and, but for the head, group. */}}

{{- define "tessera.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- include "tessera.checkStorage" . -}}
{{- $needsToken := and (eq .role "head") $values.autoscaler.enabled -}}
metadata:
  labels:
    {{- include "tessera.podLabels" . | nindent 4 }}
  {{- if or .pod.podAnnotations .pod.tolerations }}
  annotations:
    {{- with .pod.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- /* KubeRay leaves tolerations out of its comparison of clusters: alone, other ones would reach nobody. */}}
    {{- with .pod.tolerations }}
    tessera.dev/tolerations: {{ toJson . | sha256sum | trunc 16 | quote }}
    {{- end }}
  {{- end }}
spec:
  {{- /* KubeRay gives the head an account of its own, with the rights its autoscaler needs. */}}
  {{- if not $needsToken }}
  serviceAccountName: {{ include "tessera.serviceAccountName" $root }}
  {{- end }}
  automountServiceAccountToken: {{ $needsToken }}
  {{- /* A Service called tessera would otherwise set TESSERA_PORT and the like, which the settings refuse. */}}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tessera.gracePeriodSeconds" $root }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $downloads := and .group .group.model.huggingFace.repository }}
  {{- if or $downloads .pod.initContainers }}
  initContainers:
    {{- with .pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $downloads }}
    - {{ include "tessera.downloadContainer" . | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - {{ include "tessera.rayContainer" . | nindent 6 | trim }}
    {{- with .pod.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "tessera.volumes" . | nindent 4 }}
    {{- with .pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "tessera.podLabels" -}}
{{ include "tessera.selectorLabels" .root }}
tessera.dev/component: {{ .role }}
{{- with .group }}
tessera.dev/group: {{ .name }}
{{- end }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with .pod.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* KubeRay takes the first container as Ray's and writes `ray start` into it. */}}
{{- define "tessera.rayContainer" -}}
{{- $values := .root.Values -}}
name: ray-{{ .role }}
image: {{ include "tessera.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- include "tessera.securityContext" . | nindent 2 }}
env:
  {{- include "tessera.environment" . | nindent 2 }}
ports:
  {{- include "tessera.ports" . | nindent 2 }}
resources:
  {{- include "tessera.resources" . | nindent 2 }}
startupProbe:
  {{- include "tessera.rayProbe" . | nindent 2 }}
  {{- toYaml $values.probes.startup | nindent 2 }}
livenessProbe:
  {{- include "tessera.rayProbe" . | nindent 2 }}
  {{- toYaml $values.probes.liveness | nindent 2 }}
readinessProbe:
  {{- if eq .role "ingress" }}
  httpGet:
    path: {{ ternary "/health/ready" "/-/healthz" (eq $values.http.proxy "direct") }}
    port: http
    {{- if $values.http.tls.existingSecret }}
    scheme: HTTPS
    {{- end }}
  {{- else if eq .role "engine" }}
  {{- include "tessera.engineProbe" . | nindent 2 }}
  {{- else }}
  {{- include "tessera.rayProbe" . | nindent 2 }}
  {{- end }}
  {{- toYaml $values.probes.readiness | nindent 2 }}
lifecycle:
  preStop:
    exec:
      command:
        - python3
        - /etc/tessera/lifecycle/pre_stop.py
        - --role={{ ternary "head" "worker" (eq .role "head") }}
        - --timeout-s={{ add (int $values.drainTimeoutSeconds) 20 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: kernel-cache
    mountPath: /var/cache/tessera
  - name: lifecycle
    mountPath: /etc/tessera/lifecycle
    readOnly: true
  {{- if and (ne .role "head") (ne $values.weights.type "none") }}
  - name: weights
    mountPath: {{ $values.weights.mountPath }}
    readOnly: {{ $values.weights.readOnly }}
  {{- end }}
  {{- if and (eq .role "engine") (ne $values.weights.nodeCache.type "none") }}
  - name: node-weights
    mountPath: {{ include "tessera.nodeCachePath" .root }}
  {{- end }}
  {{- /* Never by subPath: a mount of a single file would not follow its secret. */}}
  {{- if eq .role "ingress" }}
  {{- if $values.auth.existingSecret }}
  - name: auth
    mountPath: /etc/tessera/auth
    readOnly: true
  {{- end }}
  {{- if $values.auth.adminExistingSecret }}
  - name: admin
    mountPath: /etc/tessera/admin
    readOnly: true
  {{- end }}
  {{- range $protocol := list "http" "grpc" }}
  {{- if (get $values $protocol).tls.existingSecret }}
  - name: {{ $protocol }}-tls
    mountPath: /etc/tessera/{{ $protocol }}-tls
    readOnly: true
  {{- end }}
  {{- end }}
  {{- end }}
  {{- with .pod.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tessera.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The agent of a Ray node answers without a token, and only while the node is part of its cluster. */}}
{{- define "tessera.rayProbe" -}}
httpGet:
  path: /api/healthz
  port: 52365
{{- end -}}

{{/* A replica listens on a socket in a folder of its own from the moment its weights are loaded until it leaves, and
     the kernel forgets the socket with the process: a list that shows it shows a loaded engine. Whether the pod lives
     is the Ray node's matter, so a pod that no replica needs yet is alive and not ready. */}}
{{- define "tessera.engineProbe" -}}
exec:
  command:
    - grep
    - --quiet
    - --extended-regexp
    - " 00010000 .* /tmp/tessera-[^/]+/channel[.]sock$"
    - /proc/net/unix
{{- end -}}

{{/* KubeRay knows three of the names: serve and gcs-server on the head, and metrics, where Ray's own are. The ports of the
     groups' metrics are not among them: another group would be another head. */}}
{{- define "tessera.ports" -}}
{{- if eq .role "head" -}}
- name: gcs-server
  containerPort: 6379
- name: dashboard
  containerPort: 8265
- name: serve
  containerPort: {{ int .root.Values.http.port }}
{{ else if eq .role "ingress" -}}
- name: http
  containerPort: {{ int .root.Values.http.port }}
- name: grpc
  containerPort: {{ int .root.Values.grpc.port }}
{{ end -}}
- name: metrics
  containerPort: 8080
{{- end -}}

{{- define "tessera.environment" -}}
{{- $values := .root.Values -}}
{{- /* HOME: compiled kernels and measured choices go below it. */ -}}
- name: HOME
  value: /var/cache/tessera
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_SERVE_USE_GRPC_BY_DEFAULT
  value: "1"
{{- /* A replica that fails its checks hangs: it would not answer a polite stop either. */}}
- name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS
  value: "1"
{{- /* Our own drain comes first; Serve's least time would only lengthen it. */}}
- name: RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S
  value: "1"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "1"
{{- if eq $values.http.proxy "haproxy" }}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
{{- end }}
{{- /* NVIDIA's container runtime gives all GPUs of a node to an image that does not say otherwise. */}}
{{- if ne .role "engine" }}
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- /* Weights come from the volume; nothing is fetched while requests are served. */}}
- name: HF_HUB_OFFLINE
  value: "1"
- name: TRITON_CACHE_DIR
  value: /var/cache/tessera/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/tessera/inductor
{{- with .pod.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The GPUs of all ranks of the one replica that the pod holds. */}}
{{- define "tessera.resources" -}}
{{- $resources := deepCopy .pod.resources -}}
{{- if and (eq .role "engine") (gt (int .group.gpusPerRank) 0) -}}
{{- $gpus := dict .group.gpuResource (mul (int .group.tpSize) (int .group.gpusPerRank) | int) -}}
{{- /* sprig merges into its first argument: each needs a map of its own. */ -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (mergeOverwrite (deepCopy (default dict (get $resources $kind))) $gpus) -}}
{{- end -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* Ingress pods need the tokenizer and the configuration, not the weights. A folder with its marker is left as it is,
     without a question to the hub; half a folder is no success, whatever lies in it. */}}
{{- define "tessera.downloadContainer" -}}
{{- $values := .root.Values -}}
{{- $source := .group.model.huggingFace -}}
name: fetch-weights
image: {{ include "tessera.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- include "tessera.securityContext" . | nindent 2 }}
command:
  - tessera
  - fetch
  - {{ $source.repository }}
  - --revision={{ $source.revision }}
  - --to={{ .group.modelPath }}
  {{- if eq .role "ingress" }}
  - --text-only
  {{- end }}
env:
  - name: HOME
    value: /tmp
  - name: HF_HOME
    value: /tmp/huggingface
  {{- /* Its chunks would fill /tmp beside the folder that the files go to. */}}
  - name: HF_XET_CHUNK_CACHE_SIZE_BYTES
    value: "0"
  {{- with $values.huggingFace.endpoint }}
  - name: HF_ENDPOINT
    value: {{ . | quote }}
  {{- end }}
  {{- if $values.huggingFace.existingSecret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ $values.huggingFace.existingSecret }}
        key: {{ $values.huggingFace.secretKey }}
  {{- end }}
  {{- range $name, $value := dict "HTTPS_PROXY" $values.huggingFace.proxy.https "HTTP_PROXY" $values.huggingFace.proxy.http "NO_PROXY" $values.huggingFace.proxy.exceptions }}
  {{- if $value }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
  {{- end }}
  {{- if $values.huggingFace.authorities.configMap }}
  {{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" }}
  - name: {{ . }}
    value: /etc/tessera/authorities/ca.crt
  {{- end }}
  {{- end }}
  {{- with $values.huggingFace.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- toYaml $values.huggingFace.resources | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- if $values.huggingFace.authorities.configMap }}
  - name: authorities
    mountPath: /etc/tessera/authorities
    readOnly: true
  {{- end }}
  {{- with .pod.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  - name: weights
    mountPath: {{ $values.weights.mountPath }}
{{- end -}}

{{- define "tessera.volumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ $values.tmp.sizeLimit }}
- name: kernel-cache
  {{- if and (eq .role "engine") (eq $values.kernelCache.type "hostPath") }}
  hostPath:
    path: {{ $values.kernelCache.hostPath }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ $values.kernelCache.sizeLimit }}
  {{- end }}
- name: lifecycle
  configMap:
    name: {{ include "tessera.fullname" .root }}-lifecycle
{{- if ne .role "head" }}
{{- if eq $values.weights.type "emptyDir" }}
- name: weights
  emptyDir:
    sizeLimit: {{ $values.weights.emptyDir.sizeLimit }}
{{- else if eq $values.weights.type "hostPath" }}
- name: weights
  hostPath:
    path: {{ $values.weights.hostPath }}
    type: Directory
{{- else if eq $values.weights.type "persistentVolumeClaim" }}
- name: weights
  persistentVolumeClaim:
    claimName: {{ include "tessera.weightsClaim" .root }}
    readOnly: {{ $values.weights.readOnly }}
{{- end }}
{{- end }}
{{- if eq .role "engine" }}
{{- with $values.weights.nodeCache }}
{{- if eq .type "hostPath" }}
- name: node-weights
  hostPath:
    path: {{ .hostPath }}
    type: Directory
{{- else if eq .type "persistentVolumeClaim" }}
- name: node-weights
  persistentVolumeClaim:
    claimName: {{ .existingClaim }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .group .group.model.huggingFace.repository $values.huggingFace.authorities.configMap }}
- name: authorities
  configMap:
    name: {{ $values.huggingFace.authorities.configMap }}
    items:
      - key: {{ $values.huggingFace.authorities.key }}
        path: ca.crt
{{- end }}
{{- if eq .role "ingress" }}
{{- range $protocol := list "http" "grpc" }}
{{- with (get $values $protocol).tls }}
{{- if .existingSecret }}
- name: {{ $protocol }}-tls
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .certificateKey }}
        path: tls.crt
      - key: {{ .privateKeyKey }}
        path: tls.key
      {{- with .clientAuthoritiesKey }}
      - key: {{ . }}
        path: clients.crt
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .role "ingress") $values.auth.adminExistingSecret }}
- name: admin
  secret:
    secretName: {{ $values.auth.adminExistingSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.auth.adminSecretKey }}
        path: api-keys
{{- end }}
{{- if and (eq .role "ingress") $values.auth.existingSecret }}
- name: auth
  secret:
    secretName: {{ $values.auth.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.auth.secretKey }}
        path: api-keys
{{- end }}
{{- end -}}
