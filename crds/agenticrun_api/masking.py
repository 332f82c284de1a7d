"""Masks passwords, tokens and keys in texts that come from the pods of a run.

More users may read the status, the events and the operator's log than the logs of pods. Secrets are
found by the names before them and by the notations of well-known services, which are those of
gitleaks and detect-secrets. A secret without either stays.
"""

from __future__ import annotations

import re

MASK = "***"

_QUOTED = r"""(?: \\?[bru]? (?: \\" [^\n]{0,4096}? \\" | "[^"\n]*" | '[^'\n]*' ) )"""
_WORD = r"[^\s,;&)}\]]+"
_IN_NAME = r"[\w.\[\]-]"
_IS = r"""\\?["']? \s* [=:] \s*"""
_PASSWORD = r"(?: passw(?:or)?d | passphrase | passcode | pwd(?!\s*=\s*/) )"
_KEY = r"(?: key(?!error|word|board) | token(?!s\b|s_|i[sz]) )"
_SECRET = rf"(?: {_KEY} | secret | credential )"
_PEM = r"[A-Z ]{0,40}PRIVATE\ KEY(?:\ BLOCK)?-----"


def _name_with(part: str) -> str:
    """Return the pattern of a whole name that has a part, and of the sign after it."""
    return rf"(?<!{_IN_NAME}) (?= {_IN_NAME}{{0,200}}? {part} ) {_IN_NAME}++ {_IS}"


_SECRETS = re.compile(
    rf"""
    (?P<kept>
        (?-i: \b[A-Z]\w{{0,64}}(?:Error|Exception|Warning) ) (?=:)
      | \b (?:bos|eos|pad|unk|sep|cls|mask|stop|image|video|special) _token \w{{0,32}}
      | \bvolume \s "[^"\n]{{1,256}}" \s :                        # the kubelet's words
      | \bnon-existent \s (?:secret|config) \s key: \s \S+
      | \bfetch \s (?:\w{{1,32}}\s)? token: (?=\s[a-z])           # containerd's words
      | (?! {_IN_NAME}{{0,200}}? (?: {_PASSWORD} | secret | credential ) ) {_name_with(_KEY)}
        (?: -?\d{{1,7}} (?:\.\d{{1,20}})? (?![\w.+/=-]) | \[ [-\d.,\s]{{0,4096}} \]? )
    )
    | -----BEGIN\ {_PEM} [\s\S]*? (?: -----END\ {_PEM} | \Z )
    | (?m:^) (?: [A-Za-z0-9+/=]{{1,76}} \s{{1,3}} ){{1,64}} -----END\ {_PEM}
    | (?P<header> \b(?:proxy-)?authorization {_IS} ["']?
        (?: (?:bearer|basic|token|apikey) \s+ (?=(?P<one>\S)) )? )
        (?(one) [^\s"',;}}\]]+ | [^\n"']+ )
    | (?P<cookie> \b(?:set-)?cookie: \s* ) [^\n]+
    | (?P<flag> (?<![\w-]) -- (?= [\w-]{{0,200}}? (?: {_SECRET} | {_PASSWORD} ) ) [\w-]++ ["']?
        (?: \s*,\s* | \s+ ) )
        (?! - | \d{{1,7}}\b ) (?: {_QUOTED} | [^\s,;&)}}\]"']+ )
    | (?P<query> [?&][\w-]{{0,64}} (?:sig|signature) = | \bSharedAccessSignature = ) [^\s&"',;]+
    | (?P<password> {_name_with(_PASSWORD)} )
        (?: {_QUOTED} | (?<=:\s) [^\n,;&}}\]]+ | {_WORD} )
    | (?P<name> {_name_with(_SECRET)} )
        (?: (?:Bearer|Basic) \s+ )? (?: {_QUOTED} | {_WORD} )
    | (?P<scheme> \b Bearer \s+ ) (?-i: (?= \S{{1,200}}[A-Z\d=._~+/-] ) ) [\w.~+/=-]{{8,}}
    | (?P<basic> \b Basic \s+ ) (?-i: (?= \S{{1,200}}[A-Z\d=] ) ) [\w+/=-]{{8,}}
    | (?P<address> \b[a-z][a-z0-9+.-]{{1,20}}:// ) [^\s/?\#"']{{1,256}} @
    | \b hooks\.slack\.com/services/ [\w/]+
    | \b (?: hf_\w{{10,}} | sk-[\w-]{{10,}} | gh[a-z]_\w{{20,}} | github_pat_\w{{20,}}
        | glpat-[\w-]{{10,}} | xox[a-z]-[\w-]{{10,}} | A[KS]IA[A-Z0-9]{{12,}}
        | eyJ[\w-]{{8,2000}}\.[\w.-]{{8,}} | nvapi-[\w-]{{20,}} | npm_\w{{30,}} | pypi-[\w-]{{16,}}
        | [sr]k_(?:live|test)_\w{{10,}} | gsk_\w{{20,}} | hv[sb]\.[\w-]{{20,}}
        | (?-i: AIza[\w-]{{30,}} | ya29\.[\w-]{{20,}} | GOCSPX-[\w-]{{20,}}
            | SG\.[\w-]{{16,}}\.[\w-]{{16,}} | AGE-SECRET-KEY-1\w{{20,}} ) )
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Parts are bounded, because a text may be made to take long."""
_BEFORE = ("header", "cookie", "flag", "query", "password", "name", "scheme", "basic")
"""Groups that stay before the mask."""


def mask_secrets(text: str) -> str:
    """Return a text in which `***` stands for what looks like a password, a token or a key.

    Numbers after names such as `token` stay: they are counts.
    """
    return _SECRETS.sub(_masked, text)


def _masked(match: re.Match[str]) -> str:
    # What only looks like a secret is consumed first, so that no later pattern sees it.
    if match["kept"]:
        return match["kept"]
    # The rest of a URL stays, because it says which service it was.
    if address := match["address"]:
        return f"{address}{MASK}@"
    return next((match[name] for name in _BEFORE if match[name]), "") + MASK
