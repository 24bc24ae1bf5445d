"""A resumed run says everything that differs from its checkpoint, and what that means."""

from petatron.config.schema.fields import fields_by_path
from petatron.train.state.resume_diff import _effect, config_for_checkpoint, resume_changes
from petatron.validate import load_config

BASE = "--preset tiny-llama --mock-data --lr 1e-3 --train-iters 10 --global-batch-size 4"


def _changes(flags: str) -> list[str]:
    then = config_for_checkpoint(load_config(BASE.split()).config)
    return resume_changes(then, load_config(f"{BASE} {flags}".split()).config, iteration=6, consumed_samples=24)


def test_nothing_changed():
    assert _changes("") == []


def test_where_and_how_a_run_is_saved_and_logged_is_not_a_change():
    assert _changes("--save x --load x --async-save --log-interval 3 --num-workers 0 --live off") == []


def test_settings_that_do_not_apply_are_not_a_change():
    [line] = _changes("--tp 2 --exit-interval 3 --exit-duration-in-mins 5 --moe-router-topk 1 --rope-scaling-factor 2")
    assert line.startswith("tensor_model_parallel_size 1 -> 2, world_size 1 -> 2: weights, optimizer state")


def test_each_effect_is_said_once_with_all_its_settings():
    found = _changes(
        "--seed 7 --split 90,5,5 --seq-length 64 --train-iters 20 --micro-batch-size 2 --bf16 --clip-grad 2"
    )
    by_settings = {line.partition(":")[0]: line.partition(": ")[2] for line in found}
    order = next(settings for settings in by_settings if "seq_length" in settings)
    assert "seed 1234 -> 7" in order and "seq_length 128 -> 64" in order and "split" not in order, (
        "mock data is not split"
    )
    assert by_settings[order].startswith("samples come from the new data") and "sample 24 of it" in by_settings[order]
    assert by_settings["train_iters 10 -> 20"] == "the run now ends there; it continues at iteration 6"
    assert "none is lost or repeated" in by_settings["micro_batch_size 1 -> 2"]
    here = next(effect for settings, effect in by_settings.items() if "clip_grad 1.0 -> 2.0" in settings)
    assert here == "takes effect from iteration 6 on"
    assert any("bf16 False -> True" in settings for settings in by_settings)


def test_fp8_is_how_products_are_done_and_not_how_weights_are_kept():
    [settings, effect] = _changes("--fp8-hybrid --fp8-recipe delayed --first-last-layers-bf16")[0].split(": ")
    for words in (
        "fp8_format None -> hybrid",
        "fp8_recipe tensorwise -> delayed",
        "first_last_layers_bf16 False -> True",
    ):
        assert words in settings
    assert effect.startswith("matrix products are done so from iteration 6 on; weights and optimizer state are not in")
    travel = "weights travel so from iteration 6 on; no product in FP8 depends on it"
    assert f"fp8_param_gather False -> True: {travel}" in _changes(
        "--fp8-hybrid --fp8-param-gather --use-distributed-optimizer --dp 2"
    )


def test_only_the_three_formats_of_weights_change_the_precision_of_weights():
    """Every other setting of the section has a word of its own."""
    said = {
        info.name: _effect("precision", info.name) or ""
        for info in fields_by_path().values()
        if info.section == "precision"
    }
    assert {name for name, effect in said.items() if "widest precision" in effect} == {"fp16", "bf16", "fp64"}
    of_products = {name for name, effect in said.items() if effect.startswith("matrix products")}
    assert {"fp8_format", "fp8_recipe", "fp8_amax_history_len", "num_layers_at_end_in_bf16"} <= of_products
    assert _changes("--fp16 --loss-scale 8 --initial-loss-scale 16") == [
        "fp16 False -> True: weights continue from the widest precision that was saved",
        "initial_loss_scale 4294967296.0 -> 16.0: a dynamic loss scale goes on where the checkpoint's stood",
        "loss_scale None -> 8.0: takes effect from iteration 6 on",
    ]


def test_every_setting_of_the_config_has_a_word_or_is_left_out_on_purpose():
    silent = {info.section for info in fields_by_path().values() if _effect(info.section, info.name) is None}
    assert silent <= {"checkpoint", "log", "launch", "tokenizer", "data", "train", "rollout"}
    said = {f"{info.section}.{info.name}" for info in fields_by_path().values() if _effect(info.section, info.name)}
    assert {"data.split", "optim.lr", "parallel.tensor_model_parallel_size", "memory.recompute_granularity"} <= said


def test_a_setting_that_came_later_than_the_checkpoint_had_its_default_then():
    run = load_config(BASE.split()).config
    then = config_for_checkpoint(run)
    del then["model"]["qk_layernorm"], then["train"]["seed"], then["train"]["freeze"]
    assert resume_changes(then, run, iteration=6, consumed_samples=24) == []


def test_cuda_graphs_change_nothing_and_were_a_boolean():
    then = config_for_checkpoint(load_config(BASE.split()).config)
    then["train"]["cuda_graphs"] = False
    assert resume_changes(then, load_config(BASE.split()).config, iteration=6, consumed_samples=24) == []


def test_mup_that_changes_learning_rates_alone_is_told_as_such():
    """Its factors are those of the model, of which another one is refused."""
    factors = "--softmax-scale 0.0625 --logits-scaling 4"
    then = config_for_checkpoint(load_config(f"{BASE} --use-mup --mup-base-hidden-size 32 {factors}".split()).config)
    told = "learning rates follow it from iteration 6 on; weights and the model's factors stay"
    for flags, difference in (
        ("", "use_mup True -> False"),
        ("--use-mup --mup-base-hidden-size 64", "mup_base_hidden_size 32 -> 64, mup_width_mult 4.0 -> 2.0"),
    ):
        run = load_config(f"{BASE} {factors} {flags}".split()).config
        assert resume_changes(then, run, iteration=6, consumed_samples=24) == [f"{difference}: {told}"]
