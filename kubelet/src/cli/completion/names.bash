
# The names of objects, as the kubelet knows them.
_hawser-kubelet-names() {
    _hawserkubelet "$@"
    local current=${COMP_WORDS[COMP_CWORD]} kind='' word at
    local -a options=()
    [[ $current != -* ]] || return 0
    for ((at = 2; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        case $word in
            -n | --namespace | --root-dir) options+=("$word" "${COMP_WORDS[++at]}") ;;
            -c | -f | -l | -L | -o | --container | --field-selector | --filename | --for | --grace-period | --label-columns | \
                --limit-bytes | --output | --selector | --since | --since-time | --sort-by | --tail | --timeout | --types)
                ((at++)) ;;
            --) return 0 ;;
            -*) ;;
            *) kind=${kind:-$word} ;;
        esac
    done
    ((at == COMP_CWORD)) || return 0
    case ${COMP_WORDS[1]} in
        get | describe | delete | wait | top) [[ -n $kind ]] || return 0 ;;
        attach | exec | logs | port-forward) [[ -z $kind ]] || return 0; kind=pods ;;
        *) return 0 ;;
    esac
    # Names of objects have no character that a shell acts on.
    COMPREPLY=($(compgen -W "$(hawser-kubelet get "$kind" "${options[@]}" -o 'jsonpath={.items[*].metadata.name}' 2> /dev/null)" -- "$current"))
}
complete -F _hawser-kubelet-names -o bashdefault -o default hawser-kubelet
