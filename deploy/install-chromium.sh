#!/bin/sh
# Installs Chromium, which the browser tests need. If this user cannot install packages, says how to.
set -eu

if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the browser tests …"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
    echo "Chromium is not installed; without it the browser tests are skipped:" \
        "sudo apt-get install chromium" >&2
fi
