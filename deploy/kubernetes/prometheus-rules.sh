#!/bin/sh
# Prints the files of deploy/prometheus/rules as PrometheusRule objects.
set -eu
cd "$(dirname "$0")/../prometheus/rules"
for file in *.yml; do
    cat <<EOF
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: care-${file%.yml}
spec:
EOF
    sed 's/^/  /' "$file"
done
