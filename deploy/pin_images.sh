#!/bin/sh
# Prints build arguments that name the Dockerfile's two bases by the digests that their tags have now:
#   docker build -t tessera:0.1.0 $(deploy/pin_images.sh) .
# Needs docker with buildx and the images' registry. Keep its output with the image: it is what to build from again.
set -eu
cd "$(dirname "$0")/.."
for name in BASE BUILD_BASE; do
    image=$(sed -n "s/^ARG $name=//p" Dockerfile)
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
    case $digest in
        sha256:*) printf -- '--build-arg %s=%s@%s\n' "$name" "$image" "$digest" ;;
        *) echo "pin_images.sh: no digest of $image: $digest" >&2; exit 1 ;;
    esac
done
