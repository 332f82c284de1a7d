{{- define "agenticrun.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Operators that watch the same namespaces have the same Lease, in whatever order they are listed. */}}
{{- define "agenticrun.lease" -}}
agenticrun-operator
{{- with .Values.watchNamespaces }}-{{ sortAlpha . | join "," | sha256sum | trunc 10 }}{{ end }}
{{- end -}}

{{/*
What the names of a shard's Deployment and Lease end with, for (list $ shard); nothing with one shard. The Lease has the number of shards as
well: operators of another number may not renew theirs, and stop.
*/}}
{{- define "agenticrun.shardSuffix" -}}
{{- if gt (int (index . 0).Values.shards) 1 }}-{{ index . 1 }}{{ end -}}
{{- end -}}

{{- define "agenticrun.shardLease" -}}
{{- include "agenticrun.lease" (index . 0) -}}
{{- with include "agenticrun.shardSuffix" . }}{{ . }}-of-{{ (index $ 0).Values.shards }}{{ end -}}
{{- end -}}

{{/* The names of all Leases, in quotes. */}}
{{- define "agenticrun.leases" -}}
{{- range $shard := until (int .Values.shards) }}{{ if $shard }}, {{ end }}{{ include "agenticrun.shardLease" (list $ $shard) | quote }}{{ end -}}
{{- end -}}

{{/*
Nothing, or a text if a part is to be installed, for (list $ .Values.<part>.<field>). A value that is left open means: if the operator
serves all namespaces, because the installer may then make objects that belong to no namespace.
*/}}
{{- define "agenticrun.clusterWidePart" -}}
{{- $wanted := index . 1 -}}
{{- if kindIs "invalid" $wanted }}{{ $wanted = not (index . 0).Values.watchNamespaces }}{{ end -}}
{{- if $wanted }}true{{ end -}}
{{- end -}}

{{- define "agenticrun.selector" -}}
app.kubernetes.io/name: agenticrun
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The labels of the pods of a shard, for (list $ shard). */}}
{{- define "agenticrun.shardSelector" -}}
{{- include "agenticrun.selector" (index . 0) -}}
{{- if include "agenticrun.shardSuffix" . }}
agenticrun.dev/shard: {{ index . 1 | quote }}
{{- end }}
{{- end -}}

{{- define "agenticrun.labels" -}}
{{ include "agenticrun.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Refuse what the schema cannot: conditions over several values, and labels that the selector reads. */}}
{{- define "agenticrun.check" -}}
{{- if and (not .Values.registry) (not (and .Values.image.repository .Values.images.worker)) -}}
{{- fail "registry: not set, and the chart of a source tree has no images of its own. Build and push them (make images REGISTRY=<host/path> PUSH=1), then add --set registry=<host/path>" -}}
{{- end -}}
{{- if eq (int .Values.metrics.port) (int .Values.probes.port) -}}
{{- fail (printf "metrics.port and probes.port are both %d: choose two ports" (int .Values.metrics.port)) -}}
{{- end -}}
{{- $ours := set (fromYaml (include "agenticrun.labels" .)) "agenticrun.dev/shard" "" -}}
{{- range $label, $_ := .Values.podLabels -}}
{{- if hasKey $ours $label -}}
{{- fail (printf "podLabels.%s: the chart sets this label itself: leave it out" $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the operator's key. */}}
{{- define "agenticrun.operatorKey" -}}
{{- .Values.operatorKey.existingSecret | default (printf "%s-operator-key" (include "agenticrun.name" .)) -}}
{{- end -}}

{{/* The affinity of a shard's pods, where values.affinity has nothing else: two of them on two nodes, if there are two. For (list $ shard). */}}
{{- define "agenticrun.affinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "agenticrun.shardSelector" . | nindent 12 }}
{{- if gt (len (index . 0).Values.architectures) 1 }}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - {key: kubernetes.io/arch, operator: In, values: {{ toJson (index . 0).Values.architectures }}}
{{- end }}
{{- end -}}

{{/* One architecture is a node selector, which a nodeAffinity in the values does not replace. */}}
{{- define "agenticrun.nodeSelector" -}}
{{- if eq (len .Values.architectures) 1 }}
kubernetes.io/arch: {{ first .Values.architectures }}
{{- end }}
{{- end -}}

{{/* The tag of the images that no value names. */}}
{{- define "agenticrun.tag" -}}
{{- .Values.tag | default .Chart.AppVersion -}}
{{- end -}}

{{- define "agenticrun.image" -}}
{{- $repository := .Values.image.repository | default (printf "%s/operator" .Values.registry) -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default (include "agenticrun.tag" .) }}
{{- end -}}
{{- end -}}

{{/* A worker image, for (list $ "worker" "the value that names it"); nothing if neither that value nor registry is set. */}}
{{- define "agenticrun.workerImage" -}}
{{- $root := index . 0 -}}
{{- if index . 2 -}}
{{ index . 2 }}
{{- else if $root.Values.registry -}}
{{ $root.Values.registry }}/{{ index . 1 }}:{{ include "agenticrun.tag" $root }}
{{- end -}}
{{- end -}}

{{/* What the operator may do where runs live: the same rules as a ClusterRole or as one Role per namespace. */}}
{{- define "agenticrun.rules" -}}
- apiGroups: [agenticrun.dev]
  resources: [agenticruns]
  verbs: [get, list, watch, delete]
- apiGroups: [agenticrun.dev]
  resources: [agenticruns/status]
  verbs: [patch]
# An ownerReference that blocks the owner's deletion needs this where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [agenticrun.dev]
  resources: [agenticruns/finalizers]
  verbs: [update]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, update, delete]
# To remove pods of runs from nodes that no longer answer.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, update, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- if ne (toString .Values.kueue.enabled) "false" }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, delete]
# To give quota back when no pod of a run is left.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
# The position of a run in its queue. Where Kueue does not serve it, the status has none.
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [events]
  # list: what a pod waits for that its node cannot prepare, such as a Secret that does not exist, is in no field of the pod.
  verbs: [create, list]
{{- end -}}
