"""`spec` of an AgenticRun."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator
from pydantic.alias_generators import to_snake

from agenticrun_api.algorithm import REFERENCE
from agenticrun_api.base import Count, Model, Name, Open, PlugIn, Quantity, Rule, refused
from agenticrun_api.names import CHECKPOINT_DIR, CODE_DIR, PACKAGES_DIR, Role
from agenticrun_api.network import Network
from agenticrun_api.pipeline import LIVE_FIELDS, Pipeline
from agenticrun_api.quantities import some_bytes
from agenticrun_api.roles import (
    ELASTIC,
    SAVES,
    Annotations,
    ElasticRole,
    Labels,
    Roles,
    reserved_labels,
)

SHORT_GRACE_SECONDS = 30
"""Termination grace period of pods that save nothing. Kubernetes' own default."""
SAVE_GRACE_SECONDS = 600
"""That of pods that save a model of unknown size."""
MAX_GRACE_SECONDS = 1800
STEP_SECONDS = 60
"""Part of the grace period that is for the end of the step in progress."""
SAVED_BYTES_PER_SECOND = 100_000_000
"""A slow network file system."""

RAY_VERSION = "2.60.0"
"""The Ray version in this release's worker image."""


class InitializeModel(Model):
    """A tiny causal LM with random weights and a word-level tokenizer, for demos and tests. Needs
    no download.
    """

    RULES = (
        Rule(
            "self.hiddenSize % self.heads == 0",
            "hiddenSize must be a multiple of heads",
            ".hiddenSize",
            lambda m: m.hidden_size % m.heads == 0,
        ),
        Rule(
            "(self.architecture == 'qwen3_moe') == has(self.experts) && "
            "has(self.experts) == has(self.expertsPerToken)",
            "set experts and expertsPerToken for architecture qwen3_moe, and for no other",
            ".experts",
            lambda m: (
                (m.architecture == "qwen3_moe")
                == (m.experts is not None)
                == (m.experts_per_token is not None)
            ),
        ),
        Rule(
            "!has(self.experts) || !has(self.expertsPerToken) || "
            "self.expertsPerToken <= self.experts",
            "expertsPerToken must not exceed experts",
            ".expertsPerToken",
            lambda m: not (m.experts and m.experts_per_token) or m.experts_per_token <= m.experts,
        ),
    )

    architecture: Literal["llama", "qwen3", "qwen3_moe"] = "llama"
    """Model class: Llama, Qwen3 or Qwen3-MoE."""
    hidden_size: Annotated[int, Field(ge=8, le=8192)] = 128
    """Size of the hidden states."""
    layers: Annotated[int, Field(ge=1, le=128)] = 2
    """Transformer layers."""
    heads: Annotated[int, Field(ge=1, le=128)] = 4
    """Attention heads of a layer."""
    intermediate_size: Annotated[int, Field(ge=8, le=32_768)] = 256
    """Size of the hidden layer of the MLPs; of a mixture of experts, of each expert."""
    experts: Annotated[int, Field(ge=2, le=256)] | None = None
    """Number of experts of a layer. Required for qwen3_moe."""
    experts_per_token: Annotated[int, Field(ge=1, le=256)] | None = None
    """Number of experts of a layer that compute a token. Required for qwen3_moe."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the random weights."""
    words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=4096)
    ] = []
    """Words of the vocabulary, in addition to the words that the run's environments declare."""

    @property
    def max_parameters(self) -> int:
        """Return a number of parameters that the model does not exceed."""
        experts = self.experts or 1
        layer = self.hidden_size * (
            4 * self.hidden_size + experts * (3 * self.intermediate_size + 1) + 4
        )
        return MAX_WORDS * self.hidden_size + self.layers * layer


MAX_WORDS = 16_384
"""More words than the tokenizer of an initialized model has. The environments declare them."""
TRAINED_BYTES = 12
"""Bytes of a trained parameter in a checkpoint: AdamW's two moments, and the weight."""
FROZEN_BYTES = 4
"""Bytes of a parameter of the reference policy in a checkpoint."""


class HuggingFace(Model):
    """Access of all pods to the Hugging Face Hub, for every model and tokenizer of the run."""

    secret_name: Name | None = None
    """A Secret in the run's namespace. Its key HF_TOKEN is the access token for gated and private
    models."""
    cache_claim_name: Name | None = None
    """An existing claim in the run's namespace for downloaded files; ReadWriteMany for pods on
    several nodes. Default: every pod downloads for itself."""
    offline: bool = False
    """true: never ask the Hub; use only what the cache holds."""


ChatFamily = Literal[
    "auto",
    "hermes",
    "qwen_xml",
    "glm",
    "gemma4",
    "gpt_oss",
    "llama3",
    "deepseek",
    "mistral",
    "lfm2",
    "muse",
    "text",
]
"""Ways in which models write tool calls and reasoning."""
_RENDERED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of chat templates that each rendering sets."""


def _template_args(args: dict[str, Any]) -> dict[str, Any]:
    for name in args:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise refused(f".{name}", "a variable of a chat template has letters, digits and _")
        if name in _RENDERED:
            raise refused(f".{name}", "each rendering sets this variable: leave it out")
    return args


class ModelSpec(Model):
    """The policy to train."""

    RULES = (
        Rule(
            "has(self.path) != has(self.initialize)",
            "set exactly one of path (a Hugging Face name or folder) and initialize",
            ".path",
            lambda m: (m.path is None) != (m.initialize is None),
        ),
        Rule(
            "has(self.path) || !has(self.chatTemplate)",
            "a model of initialize has a chat template of its own: leave chatTemplate out",
            ".chatTemplate",
            lambda m: m.path is not None or m.chat_template is None,
        ),
    )

    path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Name on the Hugging Face Hub, or a folder that every pod can read."""
    initialize: InitializeModel | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trainers' computation and of the engines' weights. Trained weights and
    optimizer state are always float32."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """The trainer's attention implementation, by its name in transformers. sdpa uses the flash
    attention of PyTorch on GPUs; eager is for the types of docs/model-types.md that need it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, as in transformers."""
    chat_template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """Jinja template that replaces the model's own, also in exported checkpoints: its text, or a
    file that the driver can read."""
    chat_template_args: Annotated[Open, AfterValidator(_template_args)] = {}
    """Variables of the chat template, such as `enable_thinking: false`, for all prompts of the run
    and for exported checkpoints."""
    chat_format: ChatFamily = "auto"
    """The way in which the model writes tool calls. auto: what its chat template writes."""
    earlier_reasoning: Literal["Keep", "Template"] = "Keep"
    """Reasoning of earlier answers in a prompt. Keep: it stays, so that an episode is one sequence.
    Template: it is dropped where the chat template drops it, and a new sequence begins there."""


CREDENTIALS = "(https?://[^/]*@|ssh://[^/@]*:[^/@]*@)"
"""Prefix of a URL that contains credentials: a password, or a user that may be a token."""


def _no_credentials(field: str) -> Rule:
    """Return a rule that an address has no user and password: all readers of the run see it."""
    return Rule(
        f"!has(self.{field}) || !self.{field}.matches('^{CREDENTIALS}')",
        f"{field} must not contain a user or password: put them into a Secret (secretName)",
        f".{field}",
        lambda m: re.match(CREDENTIALS, getattr(m, to_snake(field)) or "") is None,
    )


RelativePath = Annotated[
    str, Field(min_length=1, max_length=512, pattern=r"^[^/:\s\\]+(/[^/:\s\\]+)*$")
]
"""A path below a folder, without what PYTHONPATH cannot hold."""


def _stays_inside(field: str) -> Rule:
    """Return a rule that a relative path does not leave its folder."""
    return Rule(
        f"!has(self.{field}) || !('..' in self.{field}.split('/'))",
        f"{field} must be below the folder of the code: leave '..' out",
        f".{field}",
        lambda m: ".." not in (getattr(m, to_snake(field)) or "").split("/"),
    )


UNENCRYPTED_INSIDE = (
    "http://(localhost|127[.][0-9.]+|[a-z0-9.-]+[.]svc([.]cluster[.]local)?)(:[0-9]+)?(/.*)?"
)
"""Addresses without encryption that may get passwords: of the pod itself, and of Services. A name
without a dot is not among them: a search domain of the node may make a host outside of it."""


class GitCode(Model):
    """Modules in a Git repository. Each pod fetches `ref`, without history, before it starts."""

    RULES = (
        _no_credentials("url"),
        Rule(
            "!has(self.secretName) || !self.url.startsWith('http://') || "
            f"self.url.matches('^{UNENCRYPTED_INSIDE}$')",
            "the password of secretName would travel unencrypted: use https or ssh; http is for "
            "localhost and for a Service, as http://<service>.<namespace>.svc",
            ".url",
            lambda g: (
                g.secret_name is None
                or not g.url.startswith("http://")
                or re.fullmatch(UNENCRYPTED_INSIDE, g.url) is not None
            ),
            added=True,
        ),
        _stays_inside("path"),
    )

    url: Annotated[
        str,
        Field(
            max_length=2048,
            pattern=r"^(https?://|ssh://|[A-Za-z0-9_][A-Za-z0-9_.-]*@[A-Za-z0-9.-]+:)[^\s]+$",
        ),
    ]
    """Address by https, http or ssh, as for `git clone`."""
    ref: Annotated[
        str, Field(min_length=1, max_length=255, pattern=r"^[^-+\s~^:?*\[\\][^\s~^:?*\[\\]*$")
    ] = "HEAD"
    """Branch, tag, or commit with all 40 digits. Pods that start later get a branch's newest
    commit: name a commit for a run that can be repeated. Default: the default branch."""
    path: RelativePath | None = None
    """Folder of the repository that is put on PYTHONPATH. Default: its root."""
    secret_name: Name | None = None
    """A Secret in the run's namespace: `username` and `password` (a token) of type
    kubernetes.io/basic-auth for https, or `ssh-privatekey` (kubernetes.io/ssh-auth) and
    `known_hosts` for ssh. Only the container that fetches mounts it. With http only to localhost
    and `http://<service>.<namespace>.svc`, because it is not encrypted."""


class ImageCode(Model):
    """Modules in an image of their own, which each pod copies before it starts. The image needs
    only the program `cp`.
    """

    reference: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\s]+$")]
    """The image. It is pulled as spec.image, with spec.imagePullSecrets."""
    path: Annotated[str, Field(max_length=512, pattern=r"^/[^:\s\\]*$")] = "/code"
    """Folder of the image whose content is put on PYTHONPATH."""


class PipCode(Model):
    """Packages that the worker image lacks, installed with uv in each pod before it starts.
    Packages of the worker image keep their versions.
    """

    RULES = (
        Rule(
            "size(self.requirements) > 0 || has(self.requirementsFile)",
            "set requirements, requirementsFile or both",
            ".requirements",
            lambda p: bool(p.requirements) or p.requirements_file is not None,
        ),
        _no_credentials("indexUrl"),
        _stays_inside("requirementsFile"),
    )

    requirements: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^[^\n\r]+$")]],
        Field(max_length=256),
    ] = []
    """Lines as in a requirements.txt, for example `emoji==2.15.0 --hash=sha256:...`. Hashes are
    checked."""
    requirements_file: RelativePath | None = None
    """A requirements.txt in the folder of the code."""
    index_url: Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s]+$")] | None = None
    """Package index. Default: that of the worker image's uv, https://pypi.org/simple."""
    secret_name: Name | None = None
    """A Secret in the run's namespace with environment variables of uv, for example
    UV_DEFAULT_INDEX with user and password. Only the container that installs has them."""
    cache_claim_name: Name | None = None
    """An existing claim in the run's namespace for uv's cache; ReadWriteMany for pods on several
    nodes. Default: each pod downloads."""

    @model_validator(mode="after")
    def _requirements_have_no_credentials(self) -> Self:
        """Check each line. As a rule in CEL, 256 long lines would exceed the cost limit."""
        for number, line in enumerate(self.requirements):
            if re.search(CREDENTIALS, line):
                raise refused(
                    f".requirements[{number}]",
                    "a requirement must not contain a user or password: put them into a Secret "
                    "(secretName), for example as UV_DEFAULT_INDEX",
                )
        return self


class CodeSpec(Model):
    """The user's own modules and packages, on PYTHONPATH in every Ray container: at most one of
    configMap, git and image, and pip beside it or alone.
    """

    RULES = (
        Rule(
            "(has(self.configMap) ? 1 : 0) + (has(self.git) ? 1 : 0) + (has(self.image) ? 1 : 0) "
            "<= 1",
            "set only one of configMap, git and image",
            "",
            lambda c: len(c.sources) <= 1,
        ),
        Rule(
            "has(self.configMap) || has(self.git) || has(self.image) || has(self.pip)",
            "set configMap, git, image or pip",
            "",
            lambda c: bool(c.sources) or c.pip is not None,
        ),
        Rule(
            "!has(self.pip) || !has(self.pip.requirementsFile) || "
            "has(self.configMap) || has(self.git) || has(self.image)",
            "requirementsFile is a file of the code: set configMap, git or image, or write the "
            "lines into requirements",
            ".pip",
            lambda c: c.pip is None or c.pip.requirements_file is None or bool(c.sources),
        ),
    )

    config_map: Name | None = None
    """A ConfigMap with one file per key."""
    git: GitCode | None = None
    image: ImageCode | None = None
    pip: PipCode | None = None

    @property
    def sources(self) -> tuple[str | GitCode | ImageCode, ...]:
        """Return the sources of modules: one, or none if only packages are installed."""
        return tuple(item for item in (self.config_map, self.git, self.image) if item is not None)

    @property
    def folder(self) -> str:
        """The folder of the modules in the pods."""
        below = f"/{self.git.path}" if self.git and self.git.path else ""
        return CODE_DIR + below

    @property
    def python_path(self) -> str:
        """PYTHONPATH of the Ray containers."""
        folders = [self.folder] * bool(self.sources) + [PACKAGES_DIR] * (self.pip is not None)
        return ":".join(folders)


class VolumeClaim(Model):
    """Storage for checkpoints, mounted at /checkpoints in the head and trainer pods."""

    RULES = (
        Rule(
            "has(self.claimName) != has(self.size)",
            "set exactly one of claimName (an existing claim) and "
            "size (a claim that the operator creates)",
            ".claimName",
            lambda v: (v.claim_name is None) != (v.size is None),
        ),
        some_bytes("size"),
        Rule(
            "!has(self.claimName) || self.retain",
            "retain is about a claim that the operator creates; one by claimName is always kept: "
            "leave retain out",
            ".retain",
            lambda v: v.claim_name is None or v.retain,
        ),
    )

    claim_name: Name | None = None
    """An existing claim in the run's namespace. It is kept when the run is deleted."""
    size: Quantity | None = None
    """Size of a claim `<run>-checkpoints` that the operator creates, unless an earlier run of this
    name left it."""
    retain: bool = True
    """Keep the created claim and its checkpoints when the run is deleted. The next run of this name
    uses it, in a folder of its own. false: delete the claim with the run."""
    storage_class_name: Name | None = None
    """StorageClass of the claim that the operator creates. Default: the default class."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of the created claim. ReadWriteOnce puts head, trainer, reference and critic pods
    on one node (docs/storage.md). ReadWriteMany needs a StorageClass that offers it."""
    one_node: bool = False
    """true: one node has room for head, trainer, reference and critic pods. It allows ReadWriteOnce
    with several such pods that have GPUs of their own."""


class Checkpoint(Model):
    """Storage of checkpoints, and the checkpoint to resume from."""

    RULES = (
        Rule(
            "!self.none || (!has(self.volumeClaim) && self.uri == '/checkpoints' && "
            "self.keep == 2 && self.resume == 'Auto')",
            "none: true saves nothing: leave the other fields of checkpoint out",
            ".none",
            lambda c: (
                not c.none
                or (
                    c.volume_claim is None
                    and (c.uri, c.keep, c.resume) == ("/checkpoints", 2, "Auto")
                )
            ),
        ),
        Rule(
            "self.resume in ['Auto', 'Never', 'FromPreviousRun'] || self.resume.contains('/')",
            "resume must be Auto, Never, FromPreviousRun or the folder of a checkpoint, with a '/'",
            ".resume",
            lambda c: c.resume in ("Auto", "Never", "FromPreviousRun") or "/" in c.resume,
            added=True,
        ),
    )

    none: bool = False
    """true: save nothing, so that whatever stops the run loses what it has learnt."""
    uri: Annotated[str, Field(min_length=1, max_length=1024)] = "/checkpoints"
    """A folder that head and trainer pods share, or object storage (s3://bucket/prefix). Each run
    writes below <uri>/<name>-<uid>."""
    volume_claim: VolumeClaim | None = None
    """The claim that is mounted at `uri` in head and trainer pods. Not for object storage."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Checkpoints to keep; older ones are deleted."""
    resume: Annotated[str, Field(min_length=1, max_length=1024)] = "Auto"
    """Auto: from the newest complete checkpoint of this run. Never: from step 0. FromPreviousRun:
    from the checkpoint that earlier runs of this name saved last below `uri`. Or the folder of a
    checkpoint of any run."""


class Wandb(Model):
    """Weights & Biases. Set the API key as WANDB_API_KEY in roles.driver.env or envFrom, not
    here.
    """

    project: Annotated[str, Field(min_length=1, max_length=253)]
    """Project that the run is logged to."""
    entity: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """User or team that owns the project. Default: that of the API key."""
    group: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Group of runs in the project."""
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=32)
    ] = []
    """Tags of the run in the project."""
    mode: Literal["online", "offline"] = "online"
    """offline: write to the folder of metrics.jsonl, for a later `wandb sync`."""


class Tracking(Model):
    """Destinations of metrics and samples besides .status and Prometheus. metrics.jsonl is always
    written.
    """

    RULES = (
        Rule(
            f"!has(self.custom) || self.custom.matches('{REFERENCE}')",
            "custom is module:Class of your own",
            ".custom",
            lambda t: t.custom is None or re.fullmatch(REFERENCE, t.custom) is not None,
            value_cel="self.custom",
            value=lambda t: str(t.custom),
        ),
        Rule(
            "has(self.custom) || !has(self.customConfig)",
            "customConfig is for custom: set custom: module:Class, or leave it out",
            ".customConfig",
            lambda t: t.custom is not None or t.custom_config is None,
        ),
    )

    tensorboard: bool = True
    """Write TensorBoard events to the folder `tensorboard` of the run's output."""
    wandb: Wandb | None = None
    custom: PlugIn | None = None
    """A tracker of your own, as module:Class."""
    custom_config: Open | None = None
    """Keyword arguments of your own tracker. Put keys and tokens into roles.driver.env or envFrom,
    not here."""
    console: bool = True
    """One line per step in the driver's log."""
    sample_logs: Annotated[int, Field(ge=0, le=64)] = 1
    """Whole episodes to write as readable text to samples/step-N.txt, every
    pipeline.loggingSteps steps and at each validation."""
    render_dir: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Folder for GIFs of these episodes, if the environment can render; relative to the run's
    output folder."""


class Stall(Model):
    """Action on a driver that brings no news for too long: no step, no other activity."""

    action: Literal["Report", "Restart"] = "Report"
    """Report: the condition Stalled and an event. Restart: also end the attempt as failed."""
    min_seconds: Annotated[int, Field(ge=60, le=604_800)] = 1800
    """Shortest time without news that is a stall."""
    factor: Annotated[FiniteFloat, Field(ge=1, le=1000)] = 10.0
    """Time without news that is a stall, in median step times, if that is longer than
    minSeconds."""


class FailurePolicy(Model):
    """When the driver is restarted, when a run is given up, and how long pods may take to start."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts in a row without a new step; the run fails at the next failure. Orderly stops and
    disruptions (drains, evictions, preemptions, lost nodes, deleted pods) do not count."""
    max_disruptions: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Disruptions after which the run fails. Default: a disruption never ends a run."""
    backoff_seconds: Annotated[int, Field(ge=0, le=3600)] = 10
    """Wait before a restart. It doubles with each failure that counts, up to 10 minutes."""
    startup_deadline_seconds: Annotated[int, Field(ge=10, le=604_800)] = 3600
    """Time that the pods have to become ready, at the start and after each loss. Later, they are
    given back, and the run is Pending and tries again. A run that has never trained fails instead
    if an image cannot be pulled or a container crashes. One hour is enough for new nodes and large
    images."""
    hold_seconds: Annotated[int, Field(ge=10, le=604_800)] | None = None
    """Time for which pods that have a node wait for pods of the run that cannot be placed. Then all
    are given back, so that two runs which each hold a part of what both need do not block each
    other. Longer than an autoscaler's nodes take to come. Default: `startupDeadlineSeconds`."""
    wait_seconds: Annotated[int, Field(ge=0, le=604_800)] = 300
    """Time that the first attempt waits for all env and inference pods, at most
    `startupDeadlineSeconds`. After it, and at each restart, `minReplicas` of each are enough; the
    others join later."""
    keep_log_tail: bool = True
    """Keep the end of the driver's log in status.logTail after a failure, for all who may read the
    run, with `***` for values that look like secrets."""
    stall: Stall = Stall()


class Preemption(Model):
    """The time for a checkpoint when Kueue takes the quota of the run back."""

    grace_seconds: Annotated[int, Field(ge=0, le=3600)] = 600
    """Longest time from an eviction by Kueue until the pods are deleted. The driver ends its step
    and saves a checkpoint in this time, and the pods are deleted as soon as it has. 0: they are
    deleted at once."""


class Queue(Model):
    """The queue of Kueue that the run waits in. Its pods exist only while Kueue admits it."""

    name: Name
    """Name of the LocalQueue in the run's namespace."""
    priority_class: Name | None = None
    """Name of the WorkloadPriorityClass that orders the runs in the queue. Default: priority 0."""
    preemption: Preemption = Preemption()


class Scheduling(Model):
    """The scheduler of the run's pods, and if it places them together."""

    gang: bool = False
    """true: a batch scheduler places all pods of the run together, or none. KubeRay must be
    installed with one (its Helm value `batchScheduler.name`: volcano, yunikorn or
    scheduler-plugins). The RayCluster gets the labels that it reads for this:
    `ray.io/gang-scheduling-enabled`, and `ray.io/priority-class-name` with
    spec.priorityClassName."""
    scheduler_name: Name | None = None
    """As in a pod spec, for the pods of all roles. KubeRay sets it to that of its batch scheduler,
    if it has one."""


class Cleanup(Model):
    """Deletion of the RayCluster when the run ends. The run itself is kept."""

    on_success: Literal["Delete", "Keep"] = "Delete"
    """Keep: the pods of a run that succeeded stay, with their logs, until the run is deleted."""
    on_failure: Literal["Delete", "Keep"] = "Delete"
    """Keep: the pods of a run that failed stay, with their logs, until the run is deleted."""


_ONE_NODE_CLAIM = (
    "(has(self.checkpoint) && has(self.checkpoint.volumeClaim) "
    "? has(self.checkpoint.volumeClaim.size) "
    "&& self.checkpoint.volumeClaim.accessMode == 'ReadWriteOnce' "
    ": has(self.model.initialize) && (!has(self.checkpoint) || (!self.checkpoint.none "
    "&& (self.checkpoint.uri + '/').startsWith('/checkpoints/') "
    "&& (!has(self.roles) || size(self.roles.driver.volumeMounts) == 0))))"
)
"""`AgenticRunSpec.claims_one_node` in CEL, except that it does not read where the driver's own
volumes are mounted: a run that has some is not checked."""


def _claims_one_node(spec: AgenticRunSpec) -> bool:
    storage = spec.storage
    unknown = (
        storage is not None and storage.volume_claim is None and spec.roles.driver.volume_mounts
    )
    return spec.claims_one_node and not unknown


def _with_gpus_of_its_own(role: Role) -> str:
    return f"(has(self.roles.{role}) && self.roles.{role}.gpus > 0)"


def _same_node(role: Role) -> str:
    """Return in CEL that the node selectors of a role and of the trainer have no conflict."""
    given, trainers = f"self.roles.{role}.nodeSelector", "self.roles.trainer.nodeSelector"
    same = f"{given}.all(k, !(k in {trainers}) || {trainers}[k] == {given}[k])"
    return same if role is Role.DRIVER else f"(!has(self.roles.{role}) || {same})"


def _selects_the_trainers_node(spec: AgenticRunSpec, role: Role) -> bool:
    trainers = spec.roles.trainer.node_selector
    given = spec.roles.of(role).node_selector if spec.roles.has(role) else {}
    return all(trainers.get(key, value) == value for key, value in given.items())


_SHARE_THE_TRAINERS_NODE = (Role.DRIVER, Role.REFERENCE, Role.CRITIC)


def _without_topology(roles: tuple[Role, ...]) -> str:
    """Return in CEL that no role has a topology."""
    paths = (f"self.roles.{role}" for role in roles)
    lacks = " && ".join(f"(!has({path}) || !has({path}.topology))" for path in paths)
    return f"(!has(self.roles) || ({lacks}))"


_WORKERS = tuple(role for role in Role if role is not Role.DRIVER)
_SAVING_WORKERS = tuple(role for role in _WORKERS if role in SAVES)

ONE_NODE_RULES = (
    Rule(
        f"!{_ONE_NODE_CLAIM} || (has(self.checkpoint) && has(self.checkpoint.volumeClaim) "
        "&& self.checkpoint.volumeClaim.oneNode) || !has(self.roles) || !("
        "(self.roles.trainer.replicas > 1 && self.roles.trainer.gpus > 0) || "
        f"{_with_gpus_of_its_own(Role.REFERENCE)} || {_with_gpus_of_its_own(Role.CRITIC)})",
        "ReadWriteOnce allows one node, and several trainer pods with GPUs, or reference and "
        "critic pods with GPUs of their own, need several: set checkpoint.volumeClaim.accessMode: "
        "ReadWriteMany, or checkpoint.uri to object storage (s3://bucket/prefix), or, if one node "
        "has room for all of them, checkpoint.volumeClaim.oneNode: true",
        ".checkpoint.volumeClaim.accessMode",
        lambda s: (
            not _claims_one_node(s)
            or bool(s.storage and s.storage.volume_claim and s.storage.volume_claim.one_node)
            or not s.savers_need_several_nodes
        ),
        on_cluster=True,
        added=True,
    ),
    Rule(
        f"!{_ONE_NODE_CLAIM} || !has(self.roles) || ("
        + " && ".join(map(_same_node, _SHARE_THE_TRAINERS_NODE))
        + ")",
        "ReadWriteOnce allows one node, and nodeSelector of roles driver, reference or critic "
        "excludes the nodes of roles.trainer.nodeSelector: leave it out there, or set "
        "checkpoint.volumeClaim.accessMode: ReadWriteMany, or checkpoint.uri to object storage",
        ".checkpoint.volumeClaim.accessMode",
        lambda s: (
            not _claims_one_node(s)
            or all(_selects_the_trainers_node(s, role) for role in _SHARE_THE_TRAINERS_NODE)
        ),
        on_cluster=True,
        added=True,
    ),
    Rule(
        f"!{_ONE_NODE_CLAIM} || {_without_topology(_SAVING_WORKERS)}",
        "ReadWriteOnce allows one node, which Kueue does not know: leave topology of trainer, "
        "reference and critic out, or set accessMode: ReadWriteMany, or use object storage",
        ".checkpoint.volumeClaim.accessMode",
        # Stricter than in CEL, so that no topology is left out without a word.
        lambda s: not s.claims_one_node or not s.roles.savers_have_topology,
        on_cluster=True,
    ),
)


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


_CHANGE_IT = (
    "set suspend: true (the run saves a checkpoint), delete the run when it is Suspended, and "
    "apply it again with checkpoint.resume: FromPreviousRun to continue from that checkpoint"
)


def _immutable(field: str, required: bool) -> Rule:
    same = f"self.{field} == oldSelf.{field}"
    present = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return Rule(
        same if required else present,
        f"{field} cannot change once the run exists: {_CHANGE_IT}",
        f".{field}",
        None,
    )


def _immutable_except_replicas(role: Role) -> Rule:
    def same(path: str) -> str:
        now, before = f"self.{path}", f"oldSelf.{path}"
        return f"has({now}) == has({before}) && (!has({now}) || {now} == {before})"

    path = f"roles.{role.value}"
    fields = (
        field.alias or name
        for name, field in ElasticRole.model_fields.items()
        if name not in ("replicas", "min_replicas")
    )
    fixed = " && ".join(f"({same(f'{path}.{field}')})" for field in fields)
    return Rule(
        f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || ({fixed}))",
        f"only replicas and minReplicas of {path} can change once the run exists: {_CHANGE_IT}",
        f".{path}",
        None,
    )


FIXED_IN_PIPELINE = (
    *(
        field.alias or name
        for name, field in Pipeline.model_fields.items()
        if name not in LIVE_FIELDS
    ),
    "guards.maxSkippedSteps",
)


class AgenticRunSpec(Model):
    """One RL run."""

    RULES = (
        *(
            _immutable(field, required=True)
            for field in (
                "model",
                "rayVersion",
                "imagePullPolicy",
                "imagePullSecrets",
                "placement",
                "tracking",
                "labels",
                "annotations",
                "disruptionBudget",
            )
        ),
        *(
            _immutable(field, required=False)
            for field in ("image", "priorityClassName", "code", "checkpoint", "scheduling", "queue")
        ),
        _immutable("huggingFace", required=False),
        *(
            _immutable(f"roles.{role.value}", required=False)
            for role in Role
            if role not in ELASTIC
        ),
        *(_immutable_except_replicas(role) for role in ELASTIC),
        *(_immutable(f"pipeline.{field}", required=False) for field in FIXED_IN_PIPELINE),
        Rule(
            "!has(self.roles) || !has(self.roles.critic) || has(self.pipeline.critic)",
            "roles.critic is for pipeline.critic: leave it out",
            ".roles.critic",
            lambda s: s.roles.critic is None or s.pipeline.critic is not None,
        ),
        Rule(
            "!has(self.roles) || !has(self.roles.reference) || "
            "(has(self.pipeline.algorithm) && (has(self.pipeline.algorithm.rewardKl) || "
            "has(self.pipeline.algorithm.lossKl)))",
            "roles.reference is for KL penalties: set pipeline.algorithm.rewardKl or lossKl, or "
            "leave it out",
            ".roles.reference",
            lambda s: s.roles.reference is None or s.pipeline.uses_reference,
        ),
        reserved_labels("labels", lambda s: s.labels),
        Rule(
            "has(self.checkpoint) || has(self.model.initialize)",
            "the size of a checkpoint of model.path is not known here: set checkpoint.uri (s3://"
            "bucket/prefix), or checkpoint.volumeClaim.size (about 12 bytes x parameters x "
            "(keep + 1)), or checkpoint: {none: true} to save nothing",
            ".checkpoint",
            lambda s: s.checkpoint is not None or s.model.initialize is not None,
            on_cluster=True,
            added=True,
        ),
        Rule(
            "!has(self.checkpoint) || !has(self.checkpoint.volumeClaim) || "
            "self.checkpoint.uri.startsWith('/checkpoints')",
            "checkpoint.uri must lie below /checkpoints, where checkpoint.volumeClaim is mounted",
            ".checkpoint.uri",
            lambda s: (
                s.checkpoint is None
                or s.checkpoint.volume_claim is None
                or s.checkpoint.uri.startswith("/checkpoints")
            ),
        ),
        Rule(
            "self.placement != 'Colocated' || !has(self.roles) || !has(self.roles.inference)",
            "Colocated engines live on the trainer's pods: leave roles.inference out",
            ".roles.inference",
            lambda s: s.placement != "Colocated" or s.roles.inference is None,
        ),
        Rule(
            "self.model.attnImplementation == 'sdpa' || self.pipeline.actorTrain.strategy.name != "
            "'megatron'",
            "megatron has an attention of its own: leave attnImplementation out",
            ".model.attnImplementation",
            lambda s: (
                s.model.attn_implementation == "sdpa"
                or s.pipeline.actor_train.strategy.name != "megatron"
            ),
        ),
        Rule(
            "self.placement != 'Colocated' || self.pipeline.staleness.max == 0.0",
            "Colocated engines and trainers take turns, so that no rollout runs ahead: leave "
            "staleness.max at 0",
            ".pipeline.staleness.max",
            lambda s: s.placement != "Colocated" or s.pipeline.staleness.max == 0,
        ),
        Rule(
            "self.placement != 'Colocated' || self.pipeline.weightSync.transport != 'Broadcast'",
            "Broadcast needs a GPU for each engine and trainer: with placement Colocated, choose "
            "transport Auto, SharedMemory, ObjectStore or Disk",
            ".pipeline.weightSync.transport",
            lambda s: s.placement != "Colocated" or s.pipeline.weight_sync.transport != "Broadcast",
        ),
        Rule(
            f"has(self.queue) || {_without_topology(_WORKERS)}",
            "topology is for Kueue: set queue, or use affinity instead",
            ".roles",
            lambda s: s.queue is not None or not any(map(s.roles.topology, _WORKERS)),
        ),
        *ONE_NODE_RULES,
    )

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of all pods. Default: the operator's worker image for the run's engine (chart values
    `images`)."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """As in a container spec, for all pods."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = []
    """Names of Secrets in the run's namespace that the kubelet pulls the image with."""
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=16)] = (
        RAY_VERSION
    )
    """The Ray version in the image; at least 2.52, for token authentication."""
    labels: Labels = {}
    """Labels of the RayCluster and of all pods, in addition to the operator's own."""
    annotations: Annotations = {}
    """Annotations of the RayCluster and of all pods."""
    priority_class_name: Name | None = None
    """PriorityClass of all pods, unless a role names another one."""
    scheduling: Scheduling | None = None
    network: Network | None = None
    hugging_face: HuggingFace | None = None
    model: ModelSpec
    code: CodeSpec | None = None
    roles: Roles = Roles()
    placement: Literal["Disaggregated", "Colocated"] = "Disaggregated"
    """Disaggregated: engines have their own pods and GPUs. Colocated: engines share the trainers'
    GPUs and take turns with them."""
    pipeline: Pipeline
    checkpoint: Checkpoint | None = None
    """Storage of checkpoints. Default on Kubernetes for model.initialize: a retained claim of the
    default StorageClass, sized for the model."""
    tracking: Tracking = Tracking()
    failure_policy: FailurePolicy = FailurePolicy()
    disruption_budget: Literal["None", "Block"] = "None"
    """Block: a PodDisruptionBudget refuses evictions of ready head, trainer, reference and critic
    pods. It blocks the drain of their nodes until the run ends or is suspended. None: an eviction
    saves a checkpoint, and the run resumes on another node."""
    cleanup: Cleanup = Cleanup()
    queue: Queue | None = None
    """The Kueue queue that admits the run (docs/queues.md). Default: the run waits in no queue."""
    suspend: bool = False
    """As in a Job: true gives all pods back and keeps the run; false resumes it from its newest
    checkpoint. The driver saves a checkpoint first: it may end its step, and then has
    roles.driver.terminationGracePeriodSeconds. May change until the run has finished. `agenticrun
    run` refuses true."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = None
    """As in a Job: the run fails (reason DeadlineExceeded) this many seconds after
    status.startTime, which is a new one after a suspension. The driver saves a checkpoint first, as
    for `suspend`."""
    ttl_seconds_after_finished: Count | None = None
    """Delete the run this many seconds after it has finished."""

    @property
    def colocated(self) -> bool:
        """True if engines and trainers share GPUs."""
        return self.placement == "Colocated"

    @property
    def storage(self) -> Checkpoint | None:
        """The storage of the run's checkpoints; None if it saves none."""
        return None if self.checkpoint is None or self.checkpoint.none else self.checkpoint

    @property
    def gets_default_claim(self) -> bool:
        """True if the run names no place for its checkpoints, so that a claim is made for it.

        Its size follows from the model, so it must be known.
        """
        if self.model.initialize is None or self.checkpoint is None:
            return self.model.initialize is not None
        storage = self.storage
        if storage is None or storage.volume_claim or not _is_below(storage.uri, CHECKPOINT_DIR):
            return False
        mounts = self.roles.driver.volume_mounts
        return not any(_is_below(storage.uri, str(mount.get("mountPath"))) for mount in mounts)

    @property
    def claims_one_node(self) -> bool:
        """True if a claim is made for the run that only the pods of one node can mount."""
        if self.gets_default_claim:
            return True
        claim = self.storage.volume_claim if self.storage else None
        return claim is not None and claim.size is not None and claim.access_mode == "ReadWriteOnce"

    @property
    def savers_need_several_nodes(self) -> bool:
        """True if no node can be expected to have room for all pods that write checkpoints."""
        roles = self.roles
        beside = (roles.reference, roles.critic)
        return (roles.trainer.replicas > 1 and roles.trainer.gpus > 0) or any(
            role is not None and role.gpus > 0 for role in beside
        )

    @property
    def max_checkpoint_bytes(self) -> int | None:
        """Return a size that no checkpoint exceeds; None if the size of the model is not known."""
        if self.model.initialize is None:
            return None
        trained = 2 if self.pipeline.critic else 1
        frozen = FROZEN_BYTES if self.pipeline.uses_reference else 0
        return self.model.initialize.max_parameters * (TRAINED_BYTES * trained + frozen)

    def grace_seconds(self, role: Role) -> int:
        """Return the termination grace period of a role's pods, in seconds.

        A pod that saves keeps running for this long after it was evicted or deleted, so that the
        driver can end its step and save a checkpoint. `reporting/leave.py` returns as soon as the
        driver has done so: a long period delays only the end of a driver that is frozen.
        """
        given = self.roles.of(role).given_grace_seconds
        if given is not None:
            return given
        if role not in SAVES or not (self.storage or self.gets_default_claim):
            return SHORT_GRACE_SECONDS
        size = self.max_checkpoint_bytes
        if size is None:
            return SAVE_GRACE_SECONDS
        # The last checkpoint may still be on its way when the driver has to save another one.
        saves = math.ceil(2 * size / SAVED_BYTES_PER_SECOND)
        return min(STEP_SECONDS + saves, MAX_GRACE_SECONDS)

    @property
    def engine_role(self) -> Role:
        """The role of the pods that run the engines."""
        return Role.TRAINER if self.colocated else Role.INFERENCE

    def actors_per_pod(self, role: Role) -> dict[Role, int]:
        """Return the number of actors of each role on one pod of `role`.

        A pod runs one rank per GPU and as many engines as its GPUs suffice for; without GPUs it
        runs one of each.
        """
        gpus = self.roles.of(role).gpus
        carried: dict[Role, int] = {} if role is Role.INFERENCE else {role: max(1, gpus)}
        if role is self.engine_role:
            carried[Role.INFERENCE] = max(1, gpus // self.pipeline.actor_infer.strategy.gpus)
        return carried

    def actors(self, role: Role) -> int:
        """Return the number of actors of the role in the run."""
        pods = self.engine_role if role is Role.INFERENCE else role
        return self.roles.replicas(pods) * self.actors_per_pod(pods)[role]

    @model_validator(mode="before")
    @classmethod
    def _has_inference_pods(cls, data: Any) -> Any:
        """Add roles.inference to a Disaggregated run that does not set it.

        With a default in the schema, a Colocated run that sets it could not be rejected.
        """
        if not isinstance(data, dict) or data.get("placement", "Disaggregated") != "Disaggregated":
            return data
        roles = data.get("roles", {})
        asks = not isinstance(roles, dict) or "inference" in roles
        return data if asks else {**data, "roles": {**roles, "inference": {}}}

    @model_validator(mode="after")
    def _engines_fit_their_pods(self) -> Self:
        """Check that a pod's GPUs are a multiple of an engine's GPUs.

        This cannot be a rule in CEL, because the schema leaves the engine's options open.
        """
        try:
            needed = self.pipeline.actor_infer.strategy.gpus
        except ValueError as error:
            raise refused(".pipeline.actorInfer.strategy.config", str(error)) from error
        gpus = self.roles.of(self.engine_role).gpus
        if gpus % needed:
            message = (
                f"an engine takes {needed} GPUs (actorInfer.strategy.config): set the pod's GPUs "
                f"to a multiple of that, not {gpus}"
            )
            raise refused(f".roles.{self.engine_role}.gpus", message)
        return self
