# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash

# Sourced by examples/lab/bench/real_model.sh: prose that hides needles, of three kinds, from packages that any machine
# can install.
#
#   kvkeep_get_text NAME   sets kvkeep_text to a file of it, made once. False where the package cannot be had.
#
#   manual   a manual:               The Debian Administrator's Handbook, from Debian's package debian-handbook
#   policy   rules, in legal words:  the Debian Policy Manual, from Debian's package debian-policy
#   code     source code:            graph algorithms in Python, from the package networkx

# shellcheck disable=SC2034  # read by those who source this file
kvkeep_texts=(manual policy code)

kvkeep_get_text() {
  local name="$1" folder="$kvkeep_root/.cache/texts" unpacked
  kvkeep_text="$folder/$name.txt"
  if [[ -s "$kvkeep_text" ]]; then return 0; fi
  unpacked="$folder/$name"
  mkdir -p -- "$unpacked"
  kvkeep_say "kvkeep: loading the text '$name' into $folder"
  case "$name" in
    manual)
      kvkeep_unpack_debian debian-handbook "$unpacked" &&
        kvkeep_prose "$unpacked"/usr/share/doc/debian-handbook/html/en-US/*.html
      ;;
    policy)
      kvkeep_unpack_debian debian-policy "$unpacked" &&
        kvkeep_prose "$unpacked"/usr/share/doc/debian-policy/policy.html/ch-*.html
      ;;
    code)
      (cd -- "$unpacked" &&
        python3 -m pip download --quiet --disable-pip-version-check --no-deps networkx==3.4.2 &&
        python3 -m zipfile -e networkx-*.whl .) >&2 &&
        find "$unpacked/networkx/algorithms" -name '*.py' -not -name __init__.py -not -path '*/tests/*' -size +6k |
        LC_ALL=C sort | head -n 60 | xargs cat > "$kvkeep_text.part" && mv -- "$kvkeep_text.part" "$kvkeep_text"
      ;;
    *) kvkeep_stop "kvkeep: no text is called '$name'; allowed ${kvkeep_texts[*]}" ;;
  esac
  rm -rf -- "$unpacked"
  [[ -s "$kvkeep_text" ]]
}

kvkeep_unpack_debian() {
  (cd -- "$2" && apt-get download "$1" && dpkg-deb -x "$1"_*.deb .) >&2
}

kvkeep_prose() { python3 "$kvkeep_root/examples/lab/bench/prose.py" "$kvkeep_text" "$@" >&2; }
