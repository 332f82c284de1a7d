"""Secrets in texts of a run's pods do not reach its status."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agenticrun_api.masking import mask_secrets

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnop loads", "HF_TOKEN=*** loads"),
        ("using hf_abcdefghijklmnop", "using ***"),
        ("Incorrect API key provided: sk-proj-abcdefghijkl.", "Incorrect API key provided: ***."),
        ("AKIAABCDEFGHIJKLMNOP and ghp_abcdefghijklmnopqrstuvwx", "*** and ***"),
        ("api_key: 'a b c', next", "api_key: ***, next"),
        ('{"password": "p w", "secretRef": "x"}', '{"password": ***, "secretRef": ***}'),
        (r"{\"password\": \"p w\", \"x\": 1}", r"{\"password\": ***, \"x\": 1}"),
        ("password=b'a b' x", "password=*** x"),
        ("AWS_SECRET_ACCESS_KEY = abc/def+g", "AWS_SECRET_ACCESS_KEY = ***"),
        ("Authorization: Bearer abc.def.ghijk", "Authorization: Bearer ***"),
        ("Authorization: Token abcdef failed", "Authorization: Token *** failed"),
        ("{'Authorization': 'Token abc', 'n': 1}", "{'Authorization': 'Token ***', 'n': 1}"),
        ("authorization: abcdef", "authorization: ***"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature=c", "Authorization: ***"),
        ("Set-Cookie: sid=31d4d96e407aad42; Path=/", "Set-Cookie: ***"),
        ("token: Bearer abc.def.ghijk", "token: ***"),
        ("sent Bearer abcdefgh12", "sent Bearer ***"),
        ("sent Basic dXNlcjpwYXNz", "sent Basic ***"),
        ("GET https://me:pw@host/x?token=abc&step=1", "GET https://***@host/x?token=***&step=1"),
        ("GET https://me:p@w@host/x", "GET https://***@host/x"),
        ("redis://:pw@host:1", "redis://***@host:1"),
        ("https://a.blob/c?sv=1&sig=a%2Fb%3D&se=2", "https://a.blob/c?sv=1&sig=***&se=2"),
        ("https://s3/k?X-Amz-Signature=0aff&x=1", "https://s3/k?X-Amz-Signature=***&x=1"),
        ("https://hooks.slack.com/services/T0/B0/abc", "https://***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig", "***"),
        (f"before\n{PEM}\nafter", "before\n***\nafter"),
        (PEM.replace("\n", "\\n"), "***"),
        (PEM[:40], "***"),
        (PEM[32:] + "\nafter", "***\nafter"),
        (f"key={'AIza' + 'a1-_' * 9}", "key=***"),
        ("read " + "AIza" + "a1-_" * 9, "read ***"),
        ("pwd=hunter2 passphrase=x", "pwd=*** passphrase=***"),
        ("password: hunter two\nnext", "password: ***\nnext"),
        ("password: hunter two, user: me", "password: ***, user: me"),
        ("password=12345", "password=***"),
        ("run --token abc --steps 5", "run --token *** --steps 5"),
        ("['--api-key', 'a b', '--steps', '5']", "['--api-key', ***, '--steps', '5']"),
        *(
            (line, line)
            for line in (
                "KeyError: 'no such cell'",
                "max_tokens=512, tokens: 3, tokens_per_second=9",
                "token: 5, next_token = 151643, token_ids: [1, 22, 333], key=0.5",
                "eos_token: </s>, pad_token_id=<pad>",
                "Loaded tokenizer: Qwen/Qwen3",
                "TypeError: f() got an unexpected keyword: x",
                "git@github.com:agentic/run and s3://bucket/steps:1",
                "torch.OutOfMemoryError: CUDA out of memory",
                "NoCredentialsError: Unable to locate credentials",
                'MountVolume.SetUp failed for volume "reporter-token" : secret "x" not found',
                "references non-existent secret key: api_key",
                "failed to fetch anonymous token: unexpected status from GET",
                "couldn't find key password in Secret team/db",
                "PWD=/root OLDPWD=/",
                "basic authentication is off, bearer authentication is on",
                "run --max-tokens 512 --token 5 --keyword x",
            )
        ),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


FORMS = (
    "API_KEY={}",
    '"client_secret": "{}"',
    "db password: {}",
    "PGPASSWORD='{}'",
    "Authorization: Bearer {}",
    "Authorization: Token {}",
    "X-Auth-Token: {}",
    "--hub-token {}",
    "--password={}",
    "postgresql://user:{}@db:5432/runs",
    "https://store/x?a=1&sig={}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "ghp_{}{}",
    "AIza{}{}{}",
)
SECRET = st.text(string.ascii_letters + string.digits, min_size=12, max_size=40).filter(
    lambda text: not text.isdigit()
)


@given(st.sampled_from(FORMS), SECRET, st.text(max_size=40), st.text(max_size=40))
def test_no_text_around_a_secret_shows_it(form: str, secret: str, before: str, after: str) -> None:
    assume(secret not in before + after)
    written = form.replace("{}", secret)
    assert secret not in mask_secrets(f"{before} {written} {after}")


@given(st.text("abcdefghij ABC.,;()0123456789\n", max_size=300))
def test_prose_stays(text: str) -> None:
    assert mask_secrets(text) == text


@given(st.text(max_size=200))
def test_a_masked_text_has_nothing_more_to_mask(text: str) -> None:
    assert mask_secrets(mask_secrets(text)) == mask_secrets(text)


@pytest.mark.parametrize(
    "part",
    [
        *("a.", "eyJ-", "a-key", "a key", "https://a", "key='", "--token ", "--key", r"key=\""),
        *("-----BEGIN PRIVATE KEY-----", "abcd\n", "a ", "token=[1,", "token=[", "password: "),
        *("authorization:", "cookie: ", 'volume "', "Bearer ", "&a-", "Aa"),
    ],
)
def test_no_text_makes_the_search_slow(part: str) -> None:
    text = part * (16_384 // len(part))
    begun = time.process_time()
    mask_secrets(text)
    assert time.process_time() - begun < 0.5
