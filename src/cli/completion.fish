# SPDX-License-Identifier: Apache-2.0
# Fish completes what the command itself offers for a word, and files.
function __kvkeep_complete
    set -l words (commandline -opc)
    $words[1] __complete $words[2..-1] (commandline -ct) 2>/dev/null
end
complete -c kvkeep -a '(__kvkeep_complete)'
