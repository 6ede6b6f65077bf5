"""A replaced forward leaves alone what others put on a module: accelerate, above all."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import accelerate
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from conftest import SENTENCES, TINY, tiny_language_model, tiny_model, tiny_tokenizer
from headwise.diagnosis.diagnose import diagnose
from headwise.errors import ModelError
from headwise.forward.first_order import first_order_importance
from headwise.forward.losses import shifted_targets, summed_loss
from headwise.forward.partial_run import layer_input, replaced_attention, run_from
from headwise.forward.replaced_forward import checkpointed, frozen, fused_gelu, replaced_forward
from headwise.forward.separability import check
from headwise.forward.tap import tapped
from headwise.heads import Head, all_heads
from headwise.models.architectures import architecture_of, attention_of, device_of, layers_of
from headwise.models.description import describe_model
from headwise.models.families.known_families import ARCHITECTURES
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import require_finite
from headwise.models.patch import Slice
from headwise.models.slices import read_slices, spans_of
from headwise.proof.completed_texts import Prompt
from headwise.proof.completions import complete_prompts
from headwise.proof.settings import Sampling
from headwise.surgery.slice_training import make_masters, training_slices
from headwise.surgery.training import train
from planned import TINY_RECIPE, ablate_sets, opened, plan_for, random_batch, random_ids

# a family that goes through transformers' AttentionInterface, and the four that do not
ROUTES = ("llama", "bloom", "falcon-alibi", "mpt", "gptj")
TEXTS = [random_ids(n, n) for n in (30, 11)]
CLOSE = 1e-6
DEEP = {"num_hidden_layers": 6, "layer_types": None, "no_rope_layers": None}


def one_hook(model, folder):
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def hook_per_module(model, folder):
    return accelerate.dispatch_model(model, placement(model, "cpu"), force_hooks=True)


def first_layer_on_disk(model, folder):
    return accelerate.dispatch_model(model, placement(model, "disk"), offload_dir=folder)


def all_on_disk(model, folder):
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def all_offloaded_to_cpu(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


RESIDENT = (one_hook, hook_per_module)
OFFLOADED = (first_layer_on_disk, all_on_disk, all_offloaded_to_cpu)


def placement(model, device):
    """A device map of the smallest modules that hold tensors, layers as one; the first apart."""
    layers = [f"{architecture_of(model).layers}.{number}" for number in range(2)]
    tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    others = {name.rpartition(".")[0] for name in tensors if not name.startswith(tuple(layers))}
    return dict.fromkeys([*sorted(others), "lm_head", *layers], "cpu") | {layers[0]: device}


def on_instances(model):
    """What stands on every module, by identity, and which parameters are there."""
    names = ("forward", "_old_forward", "_hf_hook")
    hooks = {
        (place, name): id(vars(module)[name])
        for place, module in model.named_modules()
        for name in names
        if name in vars(module)
    }
    flags = {name: (p.is_meta, p.requires_grad) for name, p in model.named_parameters()}
    return hooks, flags


@pytest.fixture(params=ROUTES)
def plain(request):
    return tiny_model(request.param)


def hooked(plain, place, tmp_path):
    return place(copy.deepcopy(plain), str(tmp_path / "offload"))


def closest(left, right):
    gap = np.abs(np.asarray(left) - np.asarray(right)).max()
    return float(gap / max(np.abs(right).max(), 1e-30))  # a measure may be 0 everywhere


def relative(left, right):
    return float((left - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("place", [*RESIDENT, *OFFLOADED])
def test_a_hooked_model_has_the_same_hidden_states_however_it_is_run(plain, place, tmp_path):
    model = hooked(plain, place, tmp_path)
    before = on_instances(model)
    ids = torch.tensor(TEXTS[:1])

    def states(model):
        with torch.inference_mode(), tapped(model), fused_gelu(model):
            hidden = layer_input(model, ids, 1)
            return hidden, run_from(model, ids, 1, hidden), run_from(model, ids, 0, hidden)

    assert before[0]  # accelerate has put something there
    for found, expected in zip(states(model), states(plain), strict=True):
        assert relative(found, expected) < CLOSE
    assert on_instances(model) == before


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_deep_model_runs_from_any_layer(name):
    """Several layers in a row pass on what they get, in the form the family expects."""
    model = tiny_language_model(name, **DEEP)
    ids = torch.tensor(TEXTS[:1])
    with torch.inference_mode():
        expected = model.base_model(ids, use_cache=False).last_hidden_state
        found = run_from(model, ids, 5, layer_input(model, ids, 5))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [*RESIDENT, *OFFLOADED])
def test_ablation_of_a_hooked_model_is_that_of_the_plain_one(plain, place, tmp_path):
    model = hooked(plain, place, tmp_path)
    before = on_instances(model)
    sets = [[head] for head in all_heads(2, 4)] + [[Head(0, 1), Head(0, 2), Head(1, 3)]]
    for run in (
        lambda model: ablate_sets(model, TEXTS, sets).deltas,
        lambda model: first_order_importance(model, TEXTS),
    ):
        assert closest(run(model), run(plain)) < 10 * CLOSE  # small differences of large losses
        assert on_instances(model) == before


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("place", [*RESIDENT, *OFFLOADED])
def test_a_hooked_model_is_diagnosed_and_described_as_the_plain_one(name, place, tmp_path):
    plain, tokenizer = tiny_language_model(name), tiny_tokenizer()
    model = hooked(plain, place, tmp_path)
    before = on_instances(model)
    require_finite(model)
    assert device_of(model) == torch.device("cpu")
    assert describe_model(model) == describe_model(plain)
    found, expected = (diagnose(one, tokenizer, texts=list(SENTENCES)) for one in (model, plain))
    for measure, values in expected.maps.items():
        assert closest(found.maps[measure], values) < 1e-5, measure
    assert found.mlp_dormancy == expected.mlp_dormancy
    assert on_instances(model) == before


@pytest.mark.parametrize("place", [*RESIDENT, *OFFLOADED])
def test_a_hooked_model_completes_as_the_plain_one(plain, place, tmp_path):
    model = hooked(plain, place, tmp_path)
    small = Sampling(new_tokens=4)

    class Bytes(PreTrainedTokenizerBase):
        """Ids below 97 for any text; the tiny models of the table have no tokenizer."""

        eos_token_id = 2

        def __call__(self, text, **_):
            return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

        def decode(self, tokens, **_):
            return " ".join(map(str, tokens))

    prompts = [Prompt("The lighthouse"), Prompt("def")]
    found, expected = (
        complete_prompts(LoadedModel("tiny", one, Bytes()), prompts, small)
        for one in (model, plain)
    )
    assert found == expected


@pytest.mark.parametrize("options", [{}, {"checkpoint_layers": True}, {"cache_prefix": True}])
@pytest.mark.parametrize("place", RESIDENT)
def test_slices_of_a_hooked_model_train_as_those_of_the_plain_one(plain, place, tmp_path, options):
    model = hooked(plain, place, tmp_path)
    before = on_instances(model)
    recipe = TINY_RECIPE.model_copy(update={"steps": 3, **options})
    found = []
    for one, folder in ((model, "hooked"), (plain, "plain")):
        with opened(one, plan_for(one, "L1H0-1"), tmp_path / folder, recipe=recipe) as job:
            losses = [row.loss for row in train(job).rows]
            found.append((losses, [master.value.detach().clone() for master in job.masters]))
    (losses, masters), (expected, plain_masters) = found
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=CLOSE)
    for left, right in zip(masters, plain_masters, strict=True):
        assert relative(left, right) < 1e-5  # Adam divides by tiny second moments
    assert on_instances(model) == before


def masters_of(model):
    """Masters of one head, as it is."""
    spans = spans_of(model, [Head(0, 0)])
    values = read_slices(model, spans)
    slices = {name: Slice(span, values[name], values[name]) for name, span in spans.items()}
    return make_masters(slices, model)


@pytest.mark.parametrize("place", OFFLOADED)
def test_gradients_reach_slices_of_an_offloaded_model(plain, place, tmp_path):
    """All but writing works: the forward pass loads the weights that the slices belong to."""
    model = hooked(plain, place, tmp_path)
    before = on_instances(model)
    batch = random_batch()
    gradients = []
    for one in (model, plain):
        masters = masters_of(one)
        with training_slices(one, masters), tapped(one):
            last = one.base_model(input_ids=batch.ids, use_cache=False).last_hidden_state
            summed_loss(one, last, shifted_targets(batch.ids, batch.lengths)).backward()
        gradients.append({master.parameter: master.value.grad for master in masters})
    found, expected = gradients
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < CLOSE * largest
    assert on_instances(model) == before


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_layer_that_is_loaded_as_a_whole_is_loaded_again_to_be_recomputed(name):
    plain = tiny_model(name)
    kind = type(layers_of(plain)[0]).__name__
    model = accelerate.cpu_offload(
        copy.deepcopy(plain), execution_device="cpu", preload_module_classes=[kind]
    )
    before = on_instances(model)
    ids = random_batch().ids
    gradients = []
    for one, wrapped in ((model, checkpointed(model, 0)), (plain, nullcontext())):
        masters = masters_of(one)
        with training_slices(one, masters), wrapped, fused_gelu(one), tapped(one):
            one.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
        gradients.append([master.value.grad for master in masters])
    largest = max(float(value.abs().max()) for value in gradients[1])
    for found, expected in zip(*gradients, strict=True):
        assert float((found - expected).abs().max()) < CLOSE * largest
    assert on_instances(model) == before


@pytest.mark.parametrize("place", OFFLOADED)
def test_heads_of_an_offloaded_model_are_proved_separable_and_its_hooks_stay(place, tmp_path):
    model = hooked(tiny_model("llama"), place, tmp_path)
    before = on_instances(model)
    described = describe_model(model)
    assert check(model).passed  # it writes noise into every head's slices, and takes it out again
    assert describe_model(model) == described
    assert on_instances(model) == before


def test_weights_that_are_nowhere_are_an_error():
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(ModelError, match="no accelerate hook loads it"):
        device_of(model)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_forward_of_someone_else_comes_back_after_every_replacement(name):
    model = tiny_model(name)
    for module in model.modules():
        vars(module)["forward"] = module.forward
    before = on_instances(model)
    ids = torch.tensor(TEXTS[:1])
    hidden = layer_input(model, ids, 1)
    with tapped(model):
        run_from(model, ids, 1, hidden)
    assert on_instances(model) == before
    for opened_one in (
        replaced_attention(model, 0, None),
        checkpointed(model, 0),
        training_slices(model, masters_of(model)),
    ):
        with opened_one:
            assert on_instances(model) != before
        assert on_instances(model) == before
    with fused_gelu(model):
        assert (on_instances(model) != before) == (name == "bloom")
    assert on_instances(model) == before


def test_a_replacement_may_call_what_it_replaces_under_the_hook(tmp_path):
    model = hooked(tiny_model("llama"), hook_per_module, tmp_path)
    layer = layers_of(model)[0]
    ids = torch.tensor(TEXTS[:1])
    expected = model(ids, use_cache=False).logits
    calls = []

    def counted(module, previous):
        def forward(*args, **kwargs):
            calls.append(module)
            return previous(*args, **kwargs)

        return forward

    wrapper = vars(layer)["forward"]
    with replaced_forward([layer], counted), replaced_forward([layer], counted):
        assert vars(layer)["forward"] is wrapper  # the hook stays outermost
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert calls == [layer, layer]


def test_an_exception_while_forwards_are_put_on_leaves_nothing_behind():
    model = tiny_model("bloom")
    before = on_instances(model)
    modules = [attention_of(model, layer) for layer in range(2)]

    def fail_late(module, previous):
        if module is modules[1]:
            raise ZeroDivisionError("second")
        return previous

    with pytest.raises(ZeroDivisionError, match="second"), replaced_forward(modules, fail_late):
        pass
    assert on_instances(model) == before


def test_frozen_gives_back_only_the_gradients_that_were_asked_for():
    model = tiny_model("llama")
    model.lm_head.requires_grad_(False)
    before = on_instances(model)
    with frozen(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert on_instances(model) == before


def test_every_route_of_the_table_is_tried_here():
    bypassing = {family for family, row in ARCHITECTURES.items() if row.attention_call is not None}
    tried = {TINY[name][0] for name in ROUTES}
    assert tried == (bypassing | {"llama"}) - {"gpt_neo", "xglm"}  # same route as gptj
