#!/bin/sh
# Installs a font with Chinese characters, for the labels of plots. If this user cannot install packages, says
# how to.
set -eu

if ls /usr/share/fonts/opentype/noto/NotoSansCJK* >/dev/null 2>&1 ||
    { command -v fc-list >/dev/null && [ -n "$(fc-list ':lang=zh-cn' family)" ]; }; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing fonts-noto-cjk for the labels of plots …"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends fonts-noto-cjk >/dev/null
else
    echo "No font with Chinese characters is installed; without one, plots lack Chinese labels:" \
        "sudo apt-get install fonts-noto-cjk" >&2
fi
