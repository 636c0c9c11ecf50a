#!/bin/sh
# Plots have Chinese labels: install a font for them where that is allowed, say so where it is not.
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
    echo "No font with Chinese characters is installed, and this user cannot install one: plots will" \
        "lack Chinese labels. To have them: sudo apt-get install fonts-noto-cjk" >&2
fi
