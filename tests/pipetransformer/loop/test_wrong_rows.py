"""Where rows would be wrong, `attach` says so or computes; its nearest neighbours are served.

Each idea has a pair of tests. The first fails only if training goes through with other numbers
than the plain loop's. The second holds what is close to it, and has right rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.row_models import (
    LENGTH,
    WIDTH,
    BatchNorm,
    Block,
    ConstantPaired,
    Drawing,
    FixedFlipped,
    Flipped,
    Folder,
    Held,
    Items,
    MaskedModel,
    Model,
    ModelOfPairs,
    Named,
    Nested,
    NormBehind,
    NormedWords,
    OverBatch,
    OwnDrawing,
    OwnFlipped,
    Pair,
    Paired,
    Routed,
    TextModel,
    averaged,
    block_with,
    columns,
    counted,
    counted_plainly,
    dropped,
    entries,
    greater_in_training,
    images,
    labelled_texts,
    model,
    noisy,
    noisy_by_its_own,
    one_patch,
    picture_model,
    ragged,
    standard_over,
    texts,
)
from tests.helpers.row_stories import (
    Loop,
    Story,
    adapt,
    add_learned,
    assert_right_or_refused,
    assert_served,
    begin_to_count,
    collate_by_count,
    collate_with_flag,
    correct_label,
    edit_image,
    hook,
    noting,
    of_pair,
    replace_block,
    replace_weight,
    rescale,
    seed_its_own,
    sets,
    unhook,
    whole,
)

Caplog = pytest.LogCaptureFixture
Batch = Mapping[str, Tensor]


def stories(**named: Story) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("story", [pytest.param(s, id=n) for n, s in named.items()])


# Samples of a batch are mixed.

UNKEPT: Any = {"track_running_stats": False}
OVER_BATCH, OVER_FEATURES = partial(standard_over, 0), partial(standard_over, 2)
LAYER_NORMED = block_with(partial(nn.LayerNorm, WIDTH))


@stories(
    mean_of_a_batch=Story(model(block_with(OverBatch))),
    batch_norm_in_blocks=Story(model(block_with(partial(BatchNorm, **UNKEPT)))),
    batch_norm_below=Story(model(embed=partial(NormedWords, **UNKEPT))),
    hidden_below=Story(model(changes={0: OVER_BATCH})),
    input_that_is_read=Story(
        model(embed=one_patch, changes={-1: OVER_BATCH}),
        lambda: TensorDataset(entries()["images"][:, 0], entries()["labels"]),
    ),
)
def test_samples_mixed_below_are_right_or_refused(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)


@stories(
    layer_norm=Story(model(LAYER_NORMED)),
    running_batch_norm_in_blocks=Story(model(block_with(BatchNorm))),
    running_batch_norm_below=Story(model(embed=NormedWords)),
    mixed_above=Story(model(Block, Block, block_with(OverBatch), Block)),
    hidden_below=Story(model(changes={0: OVER_FEATURES})),
)
def test_samples_normalised_one_by_one_are_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


@stories(
    batch_norm=Story(partial(NormBehind, partial(BatchNorm, affine=False)), images),
    running_mean=Story(picture_model(changes={0: averaged}), images, prepare=begin_to_count),
)
def test_statistics_below_are_never_fed_nan_and_right_or_refused(
    story: Story, caplog: Caplog
) -> None:
    assert_right_or_refused(story, caplog)


PLAIN_NORM = partial(nn.LayerNorm, WIDTH, elementwise_affine=False)


@stories(layer_norm=Story(partial(NormBehind, PLAIN_NORM), images))
def test_a_norm_below_that_is_registered_behind_the_blocks_is_served(
    story: Story, caplog: Caplog
) -> None:
    assert_served(story, caplog)


# Hooks change hidden states.


def greater(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
    return hidden * 1.5


def looks(_: nn.Module, __: Any, hidden: Tensor) -> None:
    assert hidden.shape[-1] == WIDTH


def hooked(part: str, function: Any = greater) -> Callable[[Loop], None]:
    return lambda loop: hook(loop, part, function)


@stories(
    of_the_last_frozen_block=Story(prepare=hooked("blocks.1")),
    of_a_frozen_block=Story(prepare=hooked("blocks.0")),
    of_the_embedding=Story(prepare=hooked("embed")),
    within_a_frozen_block=Story(prepare=hooked("blocks.1.linear")),
    set_between_epochs=Story(edit=hooked("blocks.0")),
    set_within_an_epoch=Story(edit=hooked("blocks.1.linear"), is_within=True),
    removed_between_epochs=Story(prepare=hooked("blocks.0"), edit=unhook),
)
def test_a_hook_that_changes_hidden_states_is_right_or_refused(
    story: Story, caplog: Caplog
) -> None:
    assert_right_or_refused(story, caplog)


@stories(
    looks_at_the_last_frozen_block=Story(prepare=hooked("blocks.1", looks)),
    looks_at_the_embedding=Story(prepare=hooked("embed", looks)),
    changes_a_block_above=Story(prepare=hooked("blocks.2")),
)
def test_a_hook_that_only_looks_or_is_above_is_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


# Modules and plain attributes change by hand.


def add_one_if_scaled(own: Any, hidden: Tensor) -> Tensor:
    return hidden if own.scale == 1 else hidden + 1


@stories(
    last_frozen_block=Story(edit=lambda loop: replace_block(loop, 1)),
    weight=Story(edit=replace_weight, is_within=True),
    adapter_scale=Story(prepare=adapt, edit=lambda loop: rescale(loop, 0), is_within=True),
    norm_eps=Story(model(LAYER_NORMED), edit=sets("blocks.0.norm", "eps", 0.5)),
    factor=Story(edit=sets("blocks.0", "factor", 2.0), is_within=True),
    branch_of_the_model=Story(model(changes={1: add_one_if_scaled}), edit=sets("", "scale", 2.0)),
)
def test_an_edit_of_a_frozen_part_is_right_or_refused(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)


def flip_texts(loop: Loop) -> None:
    loop.dataset.columns = (loop.dataset.columns[0].flip(0), *loop.dataset.columns[1:])


def of_first_too(loop: Loop, batch: Any) -> Tensor:
    """Train on the very first batch, too."""
    loop.waiting.append(batch)
    return of_pair(loop, batch) + of_pair(loop, loop.waiting[0])


@stories(
    factor=Story(loss=of_first_too, edit=sets("blocks.0", "factor", 2.0)),
    # Within an epoch rows may have been read before their samples are edited.
    text=Story(data=lambda: Folder(*columns("ids", "labels")), loss=of_first_too, edit=flip_texts),
    image=Story(
        picture_model(),
        lambda: Folder(*columns("images", "labels")),
        of_first_too,
        edit=lambda loop: edit_image(loop, 3),
        loader={"shuffle": False},
    ),
    nothing=Story(loss=of_first_too),
)
def test_a_batch_that_is_kept_has_the_rows_of_today(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)


@stories(
    block=Story(edit=lambda loop: replace_block(loop, 3)),
    adapter_scale=Story(
        prepare=adapt, edit=lambda loop: rescale(loop, 3), is_within=True, num_epochs=4
    ),
    norm_eps=Story(
        model(LAYER_NORMED), edit=sets("blocks.3.norm", "eps", 0.5), is_within=True, num_epochs=4
    ),
)
def test_an_edit_above_frozen_blocks_is_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


# Hidden states depend on more than the sample, or more than hidden states goes up.


def pad(items: list[dict[str, Any]], length: int = 0) -> dict[str, Tensor]:
    length = max(length, *(len(item["input_ids"]) for item in items))
    padded = [F.pad(item["input_ids"], (0, length - len(item["input_ids"]))) for item in items]
    ids, labels = torch.stack(padded), torch.stack([item["labels"] for item in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def outside(loop: Loop, batch: Batch) -> Tensor:
    logits = loop.model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits, batch["labels"])


def with_aux(loop: Loop, batch: Any) -> Tensor:
    loss = of_pair(loop, batch)
    return loss + 0.1 * sum(block.aux for block in loop.model.blocks if isinstance(block, Routed))


def texts_of(loss: Any = outside, *, length: int = 0, **options: Any) -> Story:
    collate = partial(pad, length=length)
    return Story(partial(TextModel, **options), ragged, loss, loader={"collate_fn": collate})


@stories(
    padded_length=texts_of(divides=True),
    labels_below=texts_of(whole, length=LENGTH, labels_at="below"),
    number_to_the_head=Story(partial(ModelOfPairs, Paired)),
    number_to_the_next=Story(partial(ModelOfPairs, Paired, hands_on=True)),
    attribute=Story(model(Routed), loss=with_aux),
    training_below=Story(model(changes={0: greater_in_training})),
    training_below_images=Story(picture_model(changes={0: greater_in_training}), images),
    noise_between=Story(model(changes={1: noisy})),
    own_noise_below=Story(model(changes={0: noisy_by_its_own}), prepare=seed_its_own),
    learned_by_the_embedding_of_images=Story(
        picture_model(), images, prepare=lambda loop: add_learned(loop, "embed")
    ),
    learned_by_a_frozen_block=Story(prepare=lambda loop: add_learned(loop, "blocks.0")),
)
def test_what_rows_do_not_hold_is_right_or_refused(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)


@stories(
    padded_length=texts_of(),
    one_length=texts_of(length=LENGTH, divides=True),
    labels_above=texts_of(whole, length=LENGTH, labels_at="above"),
    number_to_the_head=Story(partial(ModelOfPairs, ConstantPaired)),
    attribute_above=Story(model(Block, Block, Routed, Routed), loss=with_aux),
    training_above=Story(model(changes={3: greater_in_training})),
    noise_above=Story(model(changes={3: noisy})),
    own_noise_above=Story(model(changes={3: noisy_by_its_own}), prepare=seed_its_own),
    learned_above=Story(prepare=lambda loop: add_learned(loop, "blocks.2")),
)
def test_what_rows_hold_and_what_is_above_them_is_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


# Looks at a model and a data set leave no trace.

DROPPED = model(changes={3: dropped})


@stories(
    counter=Story(model(changes={0: counted}), prepare=begin_to_count),
    plain_counter=Story(model(changes={0: counted_plainly}), prepare=begin_to_count),
    running_mean=Story(model(changes={0: averaged}), prepare=begin_to_count),
    number_drawn_for_nothing=Story(DROPPED, lambda: Drawing(*texts().tensors)),
    counting_collate=Story(prepare=collate_by_count),
)
def test_what_a_look_would_move_is_right_or_refused(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)


@stories(
    counter=Story(model(changes={3: counted}), prepare=begin_to_count),
    plain_counter=Story(model(changes={3: counted_plainly}), prepare=begin_to_count),
    running_batch_norm=Story(model(Block, Block, block_with(BatchNorm), Block)),
    flag_of_collate=Story(prepare=collate_with_flag),
    no_number_drawn=Story(DROPPED, lambda: Items(*texts().tensors)),
    number_drawn_from_its_own=Story(DROPPED, lambda: OwnDrawing(*texts().tensors)),
)
def test_counters_and_dropout_above_are_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


# One sample of many varies, or is edited.


def many(kind: Callable[..., Any], *, is_numpy: bool = False, **options: Any) -> Story:
    def data() -> Any:
        own = [entries(200)[name] for name in ("images", "labels")]
        return kind(*((one.numpy() for one in own) if is_numpy else own))

    return Story(picture_model(), data, loader={"batch_size": 40}, **options)


@stories(torch=many(Flipped), own_generator_of_numpy=many(OwnFlipped))
def test_a_rare_random_flip_is_right_or_refused_or_warned_of(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog, or_warns="random.*(cannot|unseen|not see)")


@stories(fixed=many(FixedFlipped))
def test_a_flip_of_the_same_images_is_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


def edited(kind: Callable[..., Any], edit: Callable[[Loop], None], **options: Any) -> Story:
    return many(kind, edit=edit, num_epochs=4, **options)


@stories(
    torch=edited(Folder, lambda loop: edit_image(loop, 3)),
    numpy=edited(Folder, lambda loop: edit_image(loop, 3), is_numpy=True),
)
def test_an_image_edited_in_place_is_right_within_an_epoch_or_refused(
    story: Story, caplog: Caplog
) -> None:
    assert_right_or_refused(story, caplog, is_late=True)


@stories(torch=edited(Items, correct_label), numpy=edited(Items, correct_label, is_numpy=True))
def test_a_label_corrected_at_an_unknown_place_is_right_or_refused(
    story: Story, caplog: Caplog
) -> None:
    assert_right_or_refused(story, caplog)


@stories(nothing=many(Folder), label=edited(Folder, correct_label))
def test_a_label_corrected_at_a_known_place_is_served(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


# Batches have all that the loader gives.


def of(where: Any, label: Any) -> Callable[[Loop, Any], Tensor]:
    return lambda loop, batch: F.cross_entropy(loop.model(batch[where]), batch[label])


def of_two(loop: Loop, batch: Any) -> Tensor:
    logits, (first, second) = loop.model(batch[0]), batch[1:] if len(batch) == 3 else batch[1]
    return F.cross_entropy(logits, first) + F.cross_entropy(logits, second)


def of_mask(loop: Loop, batch: Any) -> Tensor:
    return F.cross_entropy(loop.model(batch[0], attention_mask=batch[1]), batch[2])


def of_attributes(loop: Loop, batch: Any) -> Tensor:
    return F.cross_entropy(loop.model(batch.x), batch.y)


def collated(kind: Callable[..., Any], items: list[Any]) -> Any:
    return kind(*(torch.stack(each) for each in zip(*items, strict=True)))


TWO_TARGETS = columns("ids", "labels", "others")
IMAGES, LABELS = columns("images", "labels")
BY_NAME = noting("input_ids", "attention_mask", loss=outside)


@stories(
    nested_targets=Story(Model, lambda: Nested(*TWO_TARGETS), noting(0, loss=of_two)),
    one_of_two_targets=Story(Model, lambda: Items(*TWO_TARGETS), noting(0, loss=of(0, 2))),
    loss_outside_but_labels_known=Story(TextModel, labelled_texts, BY_NAME),
    mask_in_a_tuple=Story(
        MaskedModel,
        lambda: TensorDataset(*columns("ids", "mask", "labels")),
        noting(0, 1, loss=of_mask),
    ),
    image_and_label_by_name=Story(
        picture_model(),
        lambda: Named(image=IMAGES, label=LABELS),
        noting("image", loss=of("image", "label")),
    ),
)
def test_batches_are_served_with_all_that_the_loader_gives(story: Story, caplog: Caplog) -> None:
    assert_served(story, caplog)


@stories(
    named_tuple=Story(loss=of_attributes, loader={"collate_fn": partial(collated, Pair)}),
    object=Story(loss=of_attributes, loader={"collate_fn": partial(collated, Held)}),
    strings=Story(
        Model,
        lambda: Named(x=TWO_TARGETS[0], text="abcdefghijkl", y=LABELS),
        noting("x", loss=of("x", "y")),
    ),
)
def test_batches_of_other_kinds_are_right_or_refused(story: Story, caplog: Caplog) -> None:
    assert_right_or_refused(story, caplog)
