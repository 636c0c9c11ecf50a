#!/bin/sh
# Installs the programs that tests/deploy runs: Prometheus with promtool, Caddy, nginx, systemd-analyze. If this user
# cannot install packages, says how to.
set -eu

missing=""
command -v promtool >/dev/null && command -v prometheus >/dev/null || missing="$missing prometheus"
command -v caddy >/dev/null || missing="$missing caddy"
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing="$missing nginx-light"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing$missing for the tests of deploy/ …"
    # Debian starts installed servers unless this script returns 101.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
    fi
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "Not installed:$missing. Without them tests/deploy fails: sudo apt-get install$missing" >&2
fi
