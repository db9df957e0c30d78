"""Feature distillation settings: match student layers with teacher layers and check their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from posttrain.config import AttentionFeatures, DistillSection, FeaturesSection, HiddenFeatures, LayerMap
from posttrain.distill.teachers import TeacherSource
from posttrain.errors import ConfigError
from posttrain.losses.distill import DistillLoss
from posttrain.models.config import ModelConfig
from posttrain.train.layer_matching import Matching, Relation

WORDS = {"q": "queries", "k": "keys", "v": "values"}


def distill_loss(section: DistillSection) -> DistillLoss:
    features = section.features
    hidden = None if features is None else features.hidden
    attention = None if features is None else features.attention
    return DistillLoss(
        section.cross_entropy,
        hidden=0.0 if hidden is None else hidden.weight,
        attention=0.0 if attention is None else attention.weight,
        uld=_uld_weight(section),
    )


def _uld_weight(section: DistillSection) -> float:
    if not any(teacher.tokenizer == "gold" for teacher in section.teachers):
        return 0.0
    return 1.0 if section.uld_weight is None else section.uld_weight


def matching_of(features: FeaturesSection, student: ModelConfig, teacher: ModelConfig, seed: int) -> Matching:
    """Make the layer matching. ConfigError for a missing layer or projection."""
    hidden, attention = features.hidden, features.attention
    pairs = () if hidden is None else _pairs("hidden", hidden, student, teacher)
    relations = () if attention is None else tuple(_relations(attention, student, teacher))
    widths = (student.embed_dim, teacher.embed_dim)
    if hidden is not None and not hidden.project and widths[0] != widths[1]:
        raise ConfigError(
            f"features.hidden.project: false needs equal widths; the student's is {widths[0]}, the teacher's "
            f"{widths[1]}; set it to true"
        )
    project = hidden is not None and hidden.project
    kind = "cosine" if hidden is None else hidden.loss
    return Matching(hidden=pairs, kind=kind, widths=widths if project else None, relations=relations, seed=seed)


def check_features(
    section: DistillSection, teachers: Sequence[TeacherSource], student: ModelConfig | None
) -> list[str]:
    """Describe which layers are matched, in lines; or note that they could not be checked."""
    if section.features is None:
        return []
    (source,) = teachers
    teacher = source.files.config
    if student is None or teacher is None:
        return ["not checked, no network: the layers that features name"]
    matching = matching_of(section.features, student, teacher, seed=0)
    start = f"from layers of {source.title}, the student's first:"
    lines = []
    if matching.hidden:
        how = "" if matching.widths is None else f"; learned projections {matching.widths[0]} -> {matching.widths[1]}"
        lines.append(f"hidden states {start} {_shown(matching.hidden)} ({matching.kind}{how})")
    for name in dict.fromkeys(relation.name for relation in matching.relations):
        named = [relation for relation in matching.relations if relation.name == name]
        heads = ", ".join(str(heads) for heads in dict.fromkeys(relation.heads for relation in named))
        pairs = tuple((relation.student, relation.teacher) for relation in named)
        lines.append(f"relations among {WORDS[name]} {start} {_shown(pairs)} (heads: {heads})")
    return lines


def _shown(pairs: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{own} from {other}" for own, other in pairs)


def _pairs(
    name: str, features: HiddenFeatures | AttentionFeatures, student: ModelConfig, teacher: ModelConfig
) -> tuple[tuple[int, int], ...]:
    own, others = student.num_layers, teacher.num_layers
    layers: LayerMap = features.layers
    if layers == "last":
        return ((own - 1, others - 1),)
    if not isinstance(layers, dict):
        return tuple((layer, -(-(layer + 1) * others // own) - 1) for layer in range(own))
    for whose, number, model in (("student", 0, student), ("teacher", 1, teacher)):
        for pair in layers.items():
            if pair[number] >= model.num_layers:
                raise ConfigError(
                    f"features.{name}.layers: the {whose} has no layer {pair[number]}; it has {model.num_layers}, "
                    "from 0 on"
                )
    return tuple(sorted(layers.items()))


def _relations(features: AttentionFeatures, student: ModelConfig, teacher: ModelConfig) -> Iterator[Relation]:
    for own, other in _pairs("attention", features, student, teacher):
        for name in features.relations:
            heads, size = _projection(student, "student", own, name)
            other_heads, other_size = _projection(teacher, "teacher", other, name)
            widths = heads * size, other_heads * other_size
            wanted = features.heads
            if wanted is not None and any(width % wanted for width in widths):
                raise ConfigError(
                    f"features.attention.heads={wanted} must divide the widths of the {WORDS[name]}, {widths[0]} in "
                    f"layer {own} of the student and {widths[1]} in layer {other} of the teacher; use a divisor of "
                    f"{math.gcd(*widths)}"
                )
            yield Relation(own, other, name, wanted or math.gcd(heads, widths[1]))


def _projection(model: ModelConfig, whose: str, layer: int, name: str) -> tuple[int, int]:
    projection = model.blocks[layer].attention.projections.get(name)
    if projection is None:
        raise ConfigError(
            f"features.attention: layer {layer} of the {whose} has no {WORDS[name]} of its own, it takes those of a "
            "layer before; name other layers, or only the relation q"
        )
    return projection
