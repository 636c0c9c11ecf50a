#!/bin/sh
# Downloads the active version of index CARE_INDEX from SOURCE into DESTINATION.
set -eu
index="${DESTINATION:-/indexes}/$CARE_INDEX"
version=$(rclone cat "$SOURCE/$CARE_INDEX/CURRENT")
rclone copy --transfers 8 "$SOURCE/$CARE_INDEX/$version" "$index/$version"
echo "$version" >"$index/CURRENT"
