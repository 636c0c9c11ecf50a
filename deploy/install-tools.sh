#!/bin/sh
# The tests of deploy/ need Prometheus and its promtool: install Debian's where that is allowed, say
# so where it is not.
set -eu

if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing prometheus for the tests of deploy/ …"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
else
    echo "Prometheus is not installed and cannot be installed by this user: tests/deploy will fail." \
        "To run them: sudo apt-get install prometheus" >&2
fi
