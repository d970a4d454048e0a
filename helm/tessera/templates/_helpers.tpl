{{/* Names, labels and small parts. Nothing here makes an object. */}}

{{/* 37: a Service's name has 63 characters at most, and ours end in -<group>-grpc. KubeRay refuses RayServices over 47. */}}
{{- define "tessera.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | trunc 37 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "%q is no name for a RayService: lower case letters, digits and dashes, a letter first" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* What pods of this release have in common; KubeRay sets app.kubernetes.io/name on pods itself. */}}
{{- define "tessera.selectorLabels" -}}
tessera.dev/instance: {{ include "tessera.fullname" . }}
{{- end -}}

{{- define "tessera.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "tessera.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tessera.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "tessera.serviceAccountName" -}}
{{- default (ternary (include "tessera.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* All engine groups with their defaults filled in, as JSON of {groups: [...], served: [...]}: served are those that are
     enabled. Nothing of a group depends on its place in the list or on another group. */}}
{{- define "tessera.groups" -}}
{{- $groups := list -}}
{{- $served := list -}}
{{- $names := list -}}
{{- $ports := dict -}}
{{- range $given := .Values.engineGroups -}}
{{- $group := mergeOverwrite (deepCopy $.Values.engineGroupDefaults) (deepCopy $given) -}}
{{- if has $group.name $names -}}{{- fail (printf "engineGroups: %q is there twice" $group.name) -}}{{- end -}}
{{- $names = append $names $group.name -}}
{{- include "tessera.checkGroup" (dict "root" $ "group" $group) -}}
{{- $port := int $group.metricsPort | default (int $.Values.metrics.port) -}}
{{- if $group.enabled -}}
{{- with get $ports (toString $port) -}}
{{- fail (printf "engineGroups: %q and %q both have metrics port %d: give one of them a metricsPort of its own" . $group.name $port) -}}
{{- end -}}
{{- $_ := set $ports (toString $port) $group.name -}}
{{- end -}}
{{- $_ := set $group "metricsPort" $port -}}
{{- $_ := set $group "modelPath" (include "tessera.modelPath" (dict "root" $ "group" $group)) -}}
{{- $_ := set $group "servedName" (include "tessera.servedName" (dict "root" $ "group" $group)) -}}
{{- $_ := set $group "serveScaling" (include "tessera.serveScaling" (dict "root" $ "group" $group) | fromYaml) -}}
{{- $groups = append $groups $group -}}
{{- if $group.enabled -}}{{- $served = append $served $group -}}{{- end -}}
{{- end -}}
{{- if not $served -}}{{- fail "engineGroups: no group is enabled" -}}{{- end -}}
{{- if and (ne .Values.http.proxy "direct") .Values.http.tls.existingSecret -}}
{{- fail "http.tls: Ray Serve's proxies speak plain HTTP; use http.proxy: direct" -}}
{{- end -}}
{{- if and (ne .Values.http.proxy "direct") (gt (len $groups) 1) -}}
{{- fail "http.proxy: Ray Serve's proxies share one port, so they serve one engine group; use direct" -}}
{{- end -}}
{{ dict "groups" $groups "served" $served | toJson }}
{{- end -}}

{{/* What no schema can see, because it takes two values at once. Renders nothing. */}}
{{- define "tessera.checkGroup" -}}
{{- $scaling := .group.autoscaling -}}
{{- if $scaling.enabled -}}
{{- if not .root.Values.autoscaler.enabled -}}
{{- fail (printf "engineGroups %q: autoscaling needs autoscaler.enabled" .group.name) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "engineGroups %q: autoscaling.minReplicas is more than maxReplicas" .group.name) -}}
{{- end -}}
{{- if or (lt (int .group.replicas) (int $scaling.minReplicas)) (gt (int .group.replicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "engineGroups %q: replicas must lie within autoscaling.minReplicas and maxReplicas" .group.name) -}}
{{- end -}}
{{- end -}}
{{- if and .group.model.huggingFace.repository (eq .root.Values.weights.type "none") -}}
{{- fail (printf "engineGroups %q: a download needs a place: set weights.type" .group.name) -}}
{{- end -}}
{{- with .root.Values.weights -}}
{{- if and (ne .nodeCache.type "none") (ne .type "persistentVolumeClaim") -}}
{{- fail "weights.nodeCache: copies what lies on a claim; elsewhere weights are each pod's or the node's own already" -}}
{{- end -}}
{{- if and (eq .nodeCache.type "persistentVolumeClaim") (not .nodeCache.existingClaim) -}}
{{- fail "weights.nodeCache: a claim needs a name: set existingClaim" -}}
{{- end -}}
{{- end -}}
{{- if and .group.model.huggingFace.repository .root.Values.weights.readOnly -}}
{{- fail (printf "engineGroups %q: a download needs weights.readOnly: false" .group.name) -}}
{{- end -}}
{{- end -}}

{{/* Where engine pods find the node's own copies; no value, so that no two releases of a node differ in it. */}}
{{- define "tessera.nodeCachePath" -}}
/var/cache/tessera-weights
{{- end -}}

{{- define "tessera.modelPath" -}}
{{- with .group.model.huggingFace -}}
{{- if .repository -}}
{{- /* A folder for each revision: both clusters of an upgrade read their own. */ -}}
{{ $.root.Values.weights.mountPath }}/revisions/{{ .revision }}/{{ .repository }}
{{- else -}}
{{ $.group.model.path }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name by which clients call a group's model. */}}
{{- define "tessera.servedName" -}}
{{- $engine := (mergeOverwrite (deepCopy .root.Values.config) (deepCopy .group.config)).engine | default dict -}}
{{- $engine.served_model_name | default (base .group.modelPath) -}}
{{- end -}}

{{/* Pods of a worker group: replicas, minReplicas, maxReplicas. Called with root, replicas and enabled.
     KubeRay never carries a change of these three to a cluster that runs. So with Ray's autoscaler they bound nothing:
     pods follow the replicas that Serve wants, and Serve's bounds can change at any time. */}}
{{- define "tessera.podCounts" -}}
{{- $replicas := ternary (int .replicas) 0 .enabled -}}
replicas: {{ $replicas }}
{{- if .root.Values.autoscaler.enabled }}
minReplicas: 0
maxReplicas: 1000
{{- else }}
minReplicas: {{ $replicas }}
maxReplicas: {{ $replicas }}
{{- end }}
{{- end -}}

{{/* Engine replicas that a group never falls below. */}}
{{- define "tessera.leastReplicas" -}}
{{- ternary .autoscaling.minReplicas .replicas .autoscaling.enabled | int -}}
{{- end -}}

{{/* A quantity of Kubernetes in bytes. */}}
{{- define "tessera.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $text := toString . -}}
{{- mulf (regexFind "^[0-9.]+" $text) (get $units (regexFind "[A-Za-z]*$" $text)) | int64 -}}
{{- end -}}

{{/* The kubelet evicts a pod whose emptyDir volumes outgrow its containers' limits of ephemeral-storage, however large
     the volumes may be. Called as podTemplate. Renders nothing. */}}
{{- define "tessera.checkStorage" -}}
{{- $values := .root.Values -}}
{{- $limit := get (default dict .pod.resources.limits) "ephemeral-storage" -}}
{{- if $limit -}}
{{- $need := include "tessera.bytes" $values.tmp.sizeLimit | int64 -}}
{{- if or (ne .role "engine") (eq $values.kernelCache.type "emptyDir") -}}
{{- $need = add $need (include "tessera.bytes" $values.kernelCache.sizeLimit | int64) -}}
{{- end -}}
{{- if and (eq .role "engine") (eq $values.weights.type "emptyDir") -}}
{{- $need = add $need (include "tessera.bytes" $values.weights.emptyDir.sizeLimit | int64) -}}
{{- end -}}
{{- if lt (include "tessera.bytes" $limit | int64) $need -}}
{{- fail (printf "resources.limits.ephemeral-storage of the %s pods is %s, less than their emptyDir volumes may hold together (%d bytes)" .role $limit $need) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tessera.httpScheme" -}}
{{- ternary "https" "http" (ne .Values.http.tls.existingSecret "") -}}
{{- end -}}

{{/* An annotation of what the head's pods need. With Redis KubeRay ends a cluster by a Job that empties its part of it,
     made of the head's pod, which must still find these when everything else is uninstalled. */}}
{{- define "tessera.outlives" -}}
{{- if .Values.ray.faultTolerance.redisAddress }}
helm.sh/resource-policy: keep
{{- end }}
{{- end -}}

{{/* The custom resource that ties a replica to the pods made for it. */}}
{{- define "tessera.resource" -}}
tessera-{{ .role }}-{{ .group }}
{{- end -}}

{{/* Longest time a pod may need to end: SIGTERM is sent when the drain is over or this time is. */}}
{{- define "tessera.gracePeriodSeconds" -}}
{{- $drain := int .Values.drainTimeoutSeconds -}}
{{- $given := int .Values.terminationGracePeriodSeconds -}}
{{- if eq $given 0 -}}
{{ add $drain 60 }}
{{- else if lt $given (int (add $drain 30)) -}}
{{- fail "terminationGracePeriodSeconds must be at least drainTimeoutSeconds + 30: a pod killed while it drains cuts its streams" -}}
{{- else -}}
{{ $given }}
{{- end -}}
{{- end -}}

{{- define "tessera.weightsClaim" -}}
{{- default (printf "%s-weights" (include "tessera.fullname" .)) .Values.weights.persistentVolumeClaim.existingClaim -}}
{{- end -}}
