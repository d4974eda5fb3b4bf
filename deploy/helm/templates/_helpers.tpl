{{- define "landline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* 52 characters: a StatefulSet's pods and its revision label add to the name. */ -}}
{{- define "landline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "landline.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "landline.selector" -}}
app.kubernetes.io/name: {{ include "landline.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "landline.labels" -}}
{{ include "landline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "landline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "landline.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "landline.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Whether the API's port speaks TLS; empty when it does not. */ -}}
{{- define "landline.tls" -}}
{{- if or .Values.tls.secretName (hasKey .Values.secretSettings "TLS_CERT_FILE") (get .Values.settings "TLS_CERT_FILE") -}}
true
{{- end -}}
{{- end -}}

{{- define "landline.clientAuth" -}}
{{- if .Values.tls.secretName -}}
{{- .Values.tls.clientAuth -}}
{{- else -}}
{{- get .Values.settings "TLS_CLIENT_AUTH" | default "off" -}}
{{- end -}}
{{- end -}}

{{- /* Who asks how it is, and where. */ -}}
{{- define "landline.alive" -}}
{{- if eq (include "landline.clientAuth" .) "required" -}}
httpGet: {path: /livez, port: metrics}
{{- else if include "landline.tls" . -}}
httpGet: {path: /, port: pubsub, scheme: HTTPS}
{{- else -}}
httpGet: {path: /, port: pubsub}
{{- end -}}
{{- end -}}

{{- define "landline.ready" -}}
{{- if eq (include "landline.clientAuth" .) "required" -}}
httpGet: {path: /readyz, port: metrics}
{{- else if include "landline.tls" . -}}
exec: {command: [/usr/local/bin/landline, healthcheck]}
{{- else -}}
grpc: {port: 8085}
{{- end -}}
{{- end -}}

{{- /* Name and value pairs as the settings write them. */ -}}
{{- define "landline.resource" -}}
{{- $given := merge (dict) .Values.otlp.resourceAttributes (dict "k8s.namespace.name" .Release.Namespace) -}}
{{- $pairs := list -}}
{{- range $name, $value := $given -}}
{{- $pairs = append $pairs (printf "%s=%v" $name $value) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{- /* Mistakes that the schema can't see. */ -}}
{{- define "landline.check" -}}
{{- if eq .Values.mode "redis" -}}
{{- if and .Values.redis.url .Values.redis.urlSecret.name -}}
{{- fail "redis.url and redis.urlSecret.name: set one of them, not both" -}}
{{- end -}}
{{- if not (or .Values.redis.url .Values.redis.urlSecret.name) -}}
{{- fail "mode redis needs redis.url or redis.urlSecret.name" -}}
{{- end -}}
{{- if regexMatch "^[^/]*//[^/@]*:[^/@]+@" .Values.redis.url -}}
{{- fail "redis.url holds a password: put the address into a Secret and name it in redis.urlSecret" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas must not be larger than autoscaling.maxReplicas" -}}
{{- end -}}
{{- else -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail "autoscaling needs mode redis: the embedded broker is one process" -}}
{{- end -}}
{{- end -}}
{{- if eq (int .Values.metrics.port) 8085 -}}
{{- fail "metrics.port: 8085 is the port of the API" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor needs metrics.enabled" -}}
{{- end -}}
{{- if and .Values.preload (hasKey .Values.settings "PRELOAD_FILE") -}}
{{- fail "preload and settings.PRELOAD_FILE: set one of them, not both" -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- range $key := list "TLS_CERT_FILE" "TLS_KEY_FILE" "TLS_CLIENT_CA_FILE" "TLS_CLIENT_AUTH" -}}
{{- if or (hasKey $.Values.settings $key) (hasKey $.Values.secretSettings $key) -}}
{{- fail (printf "tls.secretName and settings.%s: set one of them, not both" $key) -}}
{{- end -}}
{{- end -}}
{{- else if ne .Values.tls.clientAuth "off" -}}
{{- fail "tls.clientAuth needs tls.secretName" -}}
{{- end -}}
{{- if and (eq (include "landline.clientAuth" .) "required") (not .Values.metrics.enabled) -}}
{{- fail "tls.clientAuth required needs metrics.enabled: the probes have no certificate and ask the metrics port" -}}
{{- end -}}
{{- if .Values.otlp.endpoint -}}
{{- range $key := concat (keys .Values.settings) (keys .Values.secretSettings) -}}
{{- if hasPrefix "OTLP_" $key -}}
{{- fail (printf "otlp.endpoint and settings.%s: set one of them, not both" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.console.passwordSecret.name (not .Values.metrics.enabled) -}}
{{- fail "console.passwordSecret needs metrics.enabled: the console is on the port of the metrics" -}}
{{- end -}}
{{- if and .Values.console.passwordSecret.name (hasKey .Values.settings "ADMIN_PASSWORD_FILE") -}}
{{- fail "console.passwordSecret and settings.ADMIN_PASSWORD_FILE: set one of them, not both" -}}
{{- end -}}
{{- if and .Values.console.hosts (hasKey .Values.settings "ADMIN_HOSTS") -}}
{{- fail "console.hosts and settings.ADMIN_HOSTS: set one of them, not both" -}}
{{- end -}}
{{- range $key, $_ := .Values.secretSettings -}}
{{- if hasKey $.Values.settings $key -}}
{{- fail (printf "%s is in settings and in secretSettings" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "landline.pod" -}}
metadata:
  labels:
    {{- include "landline.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Changed settings roll the pods.
    checksum/settings: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "landline.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  # The server drains by itself on SIGTERM: no preStop hook, which would hide that from the health check.
  terminationGracePeriodSeconds: {{ add .Values.drain.delaySeconds .Values.drain.seconds .Values.drain.marginSeconds }}
  containers:
    - name: landline
      image: {{ include "landline.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve]
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      ports:
        - name: pubsub
          containerPort: 8085
        {{- if .Values.metrics.enabled }}
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
        {{- end }}
      envFrom:
        - configMapRef:
            name: {{ include "landline.fullname" . }}
      env:
        - name: CONNECTORS_GCP_NODE_ID
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- if and (eq .Values.mode "redis") .Values.redis.urlSecret.name }}
        - name: CONNECTORS_GCP_BROKER_URL
          valueFrom:
            secretKeyRef:
              name: {{ .Values.redis.urlSecret.name }}
              key: {{ .Values.redis.urlSecret.key }}
        {{- end }}
        {{- if and .Values.otlp.endpoint .Values.otlp.headersSecret.name }}
        - name: CONNECTORS_GCP_OTLP_HEADERS
          valueFrom:
            secretKeyRef:
              name: {{ .Values.otlp.headersSecret.name }}
              key: {{ .Values.otlp.headersSecret.key }}
        {{- end }}
        {{- range $key, $from := .Values.secretSettings }}
        - name: CONNECTORS_GCP_{{ $key }}
          valueFrom:
            secretKeyRef:
              name: {{ $from.name }}
              key: {{ $from.key }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      startupProbe:
        {{- include "landline.alive" . | nindent 8 }}
        {{- toYaml .Values.probes.startup | nindent 8 }}
      readinessProbe:
        {{- include "landline.ready" . | nindent 8 }}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      livenessProbe:
        {{- include "landline.alive" . | nindent 8 }}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        {{- if eq .Values.mode "embedded" }}
        - name: data
          mountPath: /data
        {{- end }}
        {{- if .Values.preload }}
        - name: preload
          mountPath: /etc/landline
          readOnly: true
        {{- end }}
        {{- if .Values.tls.secretName }}
        - name: tls
          mountPath: /etc/landline-tls
          readOnly: true
        {{- end }}
        {{- if and .Values.tls.secretName .Values.tls.clientCaSecretName }}
        - name: tls-clients
          mountPath: /etc/landline-tls-clients
          readOnly: true
        {{- end }}
        {{- if and .Values.otlp.endpoint .Values.otlp.caSecret.name }}
        - name: otlp-ca
          mountPath: /etc/landline-otlp
          readOnly: true
        {{- end }}
        {{- if .Values.console.passwordSecret.name }}
        # A folder, not a file of it: only so a changed Secret arrives.
        - name: console
          mountPath: /etc/landline-console
          readOnly: true
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- if or .Values.preload .Values.console.passwordSecret.name .Values.extraVolumes .Values.tls.secretName (and .Values.otlp.endpoint .Values.otlp.caSecret.name) }}
  volumes:
    {{- if .Values.tls.secretName }}
    # Readable for the pod's group.
    - name: tls
      secret:
        secretName: {{ .Values.tls.secretName }}
        defaultMode: 288
    {{- end }}
    {{- if and .Values.tls.secretName .Values.tls.clientCaSecretName }}
    - name: tls-clients
      secret:
        secretName: {{ .Values.tls.clientCaSecretName }}
        items:
          - {key: ca.crt, path: ca.crt}
    {{- end }}
    {{- if and .Values.otlp.endpoint .Values.otlp.caSecret.name }}
    - name: otlp-ca
      secret:
        secretName: {{ .Values.otlp.caSecret.name }}
        items:
          - {key: {{ .Values.otlp.caSecret.key }}, path: ca.crt}
    {{- end }}
    {{- if .Values.preload }}
    - name: preload
      configMap:
        name: {{ include "landline.fullname" . }}-preload
    {{- end }}
    {{- if .Values.console.passwordSecret.name }}
    - name: console
      secret:
        secretName: {{ .Values.console.passwordSecret.name }}
        items:
          - key: {{ .Values.console.passwordSecret.key }}
            path: {{ .Values.console.passwordSecret.key }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml .Values.topologySpreadConstraints | nindent 4 }}
  {{- else if eq .Values.mode "redis" }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "landline.selector" . | nindent 10 }}
  {{- end }}
{{- end -}}
