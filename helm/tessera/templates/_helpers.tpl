{{/* Names, labels and small parts. Nothing here makes an object. */}}

{{/* 40: KubeRay refuses RayService names over 47, and groups append to ours. */}}
{{- define "tessera.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
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

{{/* All engine groups with their defaults filled in, as YAML of {groups: [...]}. */}}
{{- define "tessera.groups" -}}
{{- $groups := list -}}
{{- $names := list -}}
{{- range $index, $given := .Values.engineGroups -}}
{{- $group := mergeOverwrite (deepCopy $.Values.engineGroupDefaults) (deepCopy $given) -}}
{{- if has $group.name $names -}}{{- fail (printf "engineGroups: %q is there twice" $group.name) -}}{{- end -}}
{{- $names = append $names $group.name -}}
{{- include "tessera.checkGroup" (dict "root" $ "group" $group) -}}
{{- $_ := set $group "metricsPort" (add $.Values.metrics.port $index | int) -}}
{{- $_ := set $group "modelPath" (include "tessera.modelPath" (dict "root" $ "group" $group)) -}}
{{- $_ := set $group "serveScaling" (include "tessera.serveScaling" (dict "root" $ "group" $group) | fromYaml) -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- if and (ne .Values.http.proxy "direct") (gt (len $groups) 1) -}}
{{- fail "http.proxy: Ray Serve's proxies share one port, so they serve one engine group; use direct" -}}
{{- end -}}
{{ dict "groups" $groups | toJson }}
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
{{- if .group.model.huggingFace.repository -}}
{{ .root.Values.weights.mountPath }}/{{ .group.model.huggingFace.repository }}
{{- else -}}
{{ .group.model.path }}
{{- end -}}
{{- end -}}

{{/* Pods of a group that Ray's autoscaler may have: [least, most]. */}}
{{- define "tessera.engineBounds" -}}
{{- if .autoscaling.enabled -}}
{{ list (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) | toJson }}
{{- else -}}
{{ list (int .replicas) (int .replicas) | toJson }}
{{- end -}}
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
