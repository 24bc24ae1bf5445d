"""Shell scripts are read as a shell would, without running anything of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from petatron.port.shell_arithmetic import UnknownNumber, evaluate
from petatron.port.shell_interpreter import InterpretedScript, interpret
from petatron.port.shell_lexer import ScriptError


def read(text: str, given: Mapping[str, str] | None = None) -> InterpretedScript:
    return interpret(text, given=given or {}, preset={})


def arguments(text: str, given: Mapping[str, str] | None = None) -> list[str]:
    """The words of the last command."""
    return [argument.text for argument in read(text, given).commands[-1].arguments]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=(--x 1 '2 3')\nrun \"${A[@]}\" end", ["run", "--x", "1", "2 3", "end"]),
        ("A=(--x 1 '2 3')\nrun ${A[@]}", ["run", "--x", "1", "2", "3"]),
        ("A=(a b)\nA+=(c)\nrun ${A[*]} ${#A[@]} ${A[1]} $A", ["run", "a", "b", "c", "3", "b", "a"]),
        ("A=()\nrun ${A[@]} \"${A[@]}\" end", ["run", "end"]),
        ("A=\"--x 1 \\\n  --y 2\"\nrun $A", ["run", "--x", "1", "--y", "2"]),
        ("A='a b'\nrun \"$A\" x$A-y '$A' \\$A", ["run", "a b", "xa", "b-y", "$A", "$A"]),
        ("run ${X:-y} ${X-z} \"${X:-a b}\" ${X:-$HOME_OF_X}tail", ["run", "y", "z", "a b", "${HOME_OF_X}tail"]),
        ("HOME=/h\nX=~/x\nrun $X ~ ~/y '~' a~ ~b --z=~ \"~\"", ["run", "/h/x", "/h", "/h/y", "~", "a~", "~b", "--z=~", "~"]),
        ("X=\nrun ${X:-y} ${X-z} [\"$X\"]", ["run", "y", "[]"]),
        ("X=set\nrun ${X:+alternative} ${X:-no} ${Y:+none}", ["run", "alternative", "set"]),
        ("A=4; B=8\nrun $((A*B)) $(($A * ${B} / 3)) $(( (A + 1) % 3 ))", ["run", "32", "10", "2"]),
        ("F=data/model.tar.gz\nrun ${F%.gz} ${F%%.*} ${F##*/}", ["run", "data/model.tar", "data/model", "model.tar.gz"]),
        ("run a \\\n  b \\\n  c # d\n", ["run", "a", "b", "c"]),
        ("run 'it'\"'\"'s' a\"b\"c $'x\\ty'", ["run", "it's", "abc", "x\ty"]),
        ("run a > log 2>&1 b < in &> all c >> more", ["run", "a", "b", "c"]),
        ("export A=1 B='2 3'\nlocal C=(4 5)\nrun $A \"$B\" ${C[1]}", ["run", "1", "2 3", "5"]),
        ("f() { run \"$1\" $2; }\nf 'a b' c", ["run", "a b", "c"]),
        ("C=\"run --a 'b c'\"\neval $C", ["run", "--a", "b c"]),
        ("srun -n 2 bash -c 'A=1; run $A'", ["srun", "-n", "2", "run", "1"]),
        ("srun -l bash -x -c 'A=1; run $A'", ["srun", "-l", "run", "1"]),
        ("bash -eux -o pipefail -c 'run'", ["bash", "-eux", "-o", "pipefail", "-c", "run"]),
        ("set -- a b c\nshift\nrun $1 $# \"$@\"", ["run", "b", "2", "b", "c"]),
        ("A=1 B=2 run $A", ["run", "1"]),
        ("cat <<EOF\n--x \" ' $(no)\nEOF\nrun a", ["run", "a"]),
        ("cat <<-'E'\n\tx\n\tE\nrun a", ["run", "a"]),
        ("run a | tee log", ["tee", "log"]),
        ("run a#b c=#d", ["run", "a#b", "c=#d"]),
        ("A=(--x 1 \\\n  # --y 2 \\\n --z)\nrun ${A[@]}", ["run", "--x", "1", "--z"]),
        ("if [ -z ${MODE} ]; then MODE=plain; fi\nrun $MODE", ["run", "plain"]),
        ("C='a\n --b'\nC=\"run $C | tee log_$(date)\"\neval ${C}", ["tee", "log_$(date)"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(script: str, expected: list[str]):
    assert arguments(script) == expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('[ -z "$X" ]', "yes"),
        ('[ -n "$X" ]', "no"),
        ('[[ "$DTYPE" == "fp8" ]]', "yes"),
        ("[[ $DTYPE == fp* ]]", "yes"),
        ('[ "$DTYPE" != "fp8" ]', "no"),
        ('! [ "$DTYPE" = "fp8" ]', "no"),
        ("[ $N -gt 4 ]", "yes"),
        ("[ $N -le 4 ]", "no"),
        ("(( N > 4 ))", "yes"),
        ('[ "$DTYPE" = fp8 ] && [ $N -eq 8 ]', "yes"),
        ('[[ "$DTYPE" == bf16 ]] || [[ $N == 7 ]]', "no"),
        ('[[ "$DTYPE" == bf16 ]] || [[ $N == 7 ]] || [[ -z "$X" ]]', "yes"),
        ('[[ "$DTYPE" == bf16 || $N == 8 ]]', "yes"),
        ("true", "yes"),
        ("[ -f /etc/passwd ]", "unknown"),
        ("nvidia-smi", "unknown"),
        ("[ $(nproc) -gt 4 ]", "unknown"),
        ('[ "$DTYPE" = fp8 ] && [ -d /tmp ]', "unknown"),
    ],
)
def test_conditions_are_decided_or_named(condition: str, expected: str):
    script = read(f"DTYPE=fp8; N=8\nA=unknown\nif {condition}; then A=yes; else A=no; fi\nrun $A")
    assert script.commands[-1].arguments[1].text == expected
    named = [note for note in script.notes if "cannot be decided" in note.text]
    assert len(named) == (expected == "unknown") and all("it may set A" in note.text for note in named)


def test_short_forms_of_conditions():
    assert arguments("P=bf16\n[ $P = bf16 ] && A=1 || A=2\n[ $P = fp16 ] && B=1 || B=2\nrun $A $B") == ["run", "1", "2"]
    assert arguments('[ -z "$LR" ] && LR=1e-4\n[ -n "$LR" ] || LR=2\nrun $LR') == ["run", "1e-4"]


def test_blocks_of_every_kind():
    case = 'case "$S" in\n  "8B"|13B) A=large ;;\n  8*) A=some;;\n  *) A=other; exit 1;;\nesac\nrun $A'
    assert arguments(case, {"S": "8B"})[1] == "large" and arguments(case, {"S": "800M"})[1] == "some"
    assert arguments(case)[1] == "other"
    loop = read("for N in 1 2 4; do\n  run $N\ndone\nwhile read LINE; do other; done")
    assert [item.arguments[1].text for item in loop.commands] == ["1"]
    assert "only the first is read, N=1" in loop.notes[0].text and "loop is left out" in loop.notes[1].text


def test_an_exit_in_a_block_does_not_hide_the_command():
    script = read('if [ -z "$1" ]; then\n  echo usage\n  exit 1\nfi\nrun $1')
    assert script.commands[-1].arguments[1].missing == ("1",)
    assert any("would end in this block" in note.text for note in script.notes)
    assert [item.arguments[0].text for item in read("run a\nexit 0\nrun b").commands] == ["run"]


@pytest.mark.parametrize(
    ("script", "name", "reason"),
    [
        ("P=$1\nrun --load $P", "P", "it is $1, an argument of the script"),
        ("run --load $P", "P", "the script does not set it, and the environment is not read"),
        ("P=$(date +%s)\nrun --load $P/x", "P", "it is the output of `date +%s`, which is not run"),
        ("P=`nproc`\nrun --load $P", "P", "it is the output of `nproc`, which is not run"),
        ("P=$(pwd)/x\nrun --load $P", "PWD", "the shell that starts the run has it"),
        ("P=<Specify path>\nrun --load $P", "P", "<Specify path> is a placeholder"),
        ("P=<Specify path to file>/vocab.json\nrun --load $P", "P", "<Specify path to file> is a placeholder"),
        ("N=$((X * 2))\nrun --load $N", "X", "the script does not set it, and the environment is not read"),
        ("P=${!Q}\nrun --load $P", "P", "`${!Q}` is not evaluated"),
        ("P=${P:?is needed}\nrun --load $P", "P", "the script does not set it, and the environment is not read"),
    ],
)  # fmt: skip
def test_what_is_not_known_keeps_its_name(script: str, name: str, reason: str):
    result = read(script)
    assert result.commands[-1].arguments[-1].missing == (name,)
    assert result.variables.reasons.get(name, reason) == reason
    assert not read(script, {name: "5"}).commands[-1].arguments[-1].missing


def test_a_name_without_a_value_is_missing_in_its_own_word_alone():
    flags = "--data-path $CORPUS --split 99,1,0 --train-iters $((STEPS * 2)) --seed 1"
    texts = read(f'ARGS="{flags}"\ntorchrun pretrain_gpt.py $ARGS').commands[-1].arguments
    missing = {text.text: text.missing for text in texts if text.missing}
    assert missing == {"${CORPUS}": ("CORPUS",), "$((STEPS*2))": ("STEPS",)}


def test_a_long_value_is_not_cut():
    """A pattern is stripped from the end in time that grows with the square of the length."""
    for length, expected in ((900, "x" * 900), (2000, None)):
        texts = read(f"A={'x' * length}.sh\ntorchrun pretrain_gpt.py --name ${{A%.sh}}").commands[-1].arguments
        assert texts[-1].text == expected if expected else texts[-1].missing


def test_a_value_of_the_user_wins():
    assert arguments("P=$1\nN=2\nrun $P $N", {"P": "/data", "N": "8"}) == ["run", "/data", "8"]
    assert arguments('run $1 "$@"', {"1": "a b", "2": "c"}) == ["run", "a", "b", "a b", "c"]
    assert arguments('run "${A[@]}" "${B[@]}" "$A"', {"A": "--x 'a b'", "B": ""}) == ["run", "--x", "a b", "--x 'a b'"]
    assert arguments('run "${A[@]}"', {"A": "it's --x"}) == ["run", "it's", "--x"]


PLAIN = "--num-layers 2\n  --lr 1\n\n  --seed 5"
CONTINUED = "--num-layers 2 \\\n  --lr 1 \\\n \\\n  --seed $SEED"


@pytest.mark.parametrize(
    "script",
    [
        f'A="\n"\nA="{PLAIN}\n"\nrun $A',
        f"A=x\n\nA='{PLAIN}'\nA=\"$A \\\n--bf16\"\nrun $A",
        f"A=x\n\nrun {CONTINUED}",
        f'A=x\n\neval "run {CONTINUED}"',
        f'A=x\n\nC="run {CONTINUED}"\neval $C > log',
        f"A=x\n\nC='run {CONTINUED}'\nsrun bash -c \"${{C}}\"",
        f'A="run "\n\nA+="{CONTINUED}"\n$A',
        f'f() {{\n run $1\n}}; f "{CONTINUED}"',
        f'A=x\n\nA=(run "{CONTINUED}")\neval "${{A[@]}}"',
    ],
)
def test_a_word_of_a_quoted_text_has_its_own_line(script: str):
    lines = {text.text: text.line for text in read(script).commands[-1].arguments}
    assert (lines["--num-layers"], lines["2"], lines["--lr"], lines["1"], lines["--seed"]) == (3, 3, 4, 4, 6)


def test_a_command_in_a_text_begins_at_its_own_line():
    script = read('C="\ncd /x;\nfirst\n  second \\\n --x\n"\neval "$C"')
    assert [(command.line, command.arguments[0].text) for command in script.commands] == [
        *((2, "cd"), (3, "first"), (4, "second"))
    ]


@pytest.mark.parametrize(
    ("script", "line", "why"),
    [
        ("run\nA='open", 2, "quote (') has no end"),
        ('run "open', 1, 'quote (") has no end'),
        ("run `open", 1, "quote (`) has no end"),
        ("\n\nrun ${A", 3, "bracket (${) has no end"),
        ("run $((1 + 2)", 1, "bracket ($(() has no end"),
        ("A=(1 2", 1, "array has no end"),
        ("if true; then\nrun", 1, "has no 'fi'"),
        ("for x in 1 2; do\nrun", 1, "has no 'done'"),
        ("case x in\na) run", 1, "has no 'esac'"),
        ("run\nfi", 2, "'fi' closes nothing"),
        ("run )", 1, "')' closes nothing"),
        ("run && && run", 1, "follows no command"),
        ("A=(1; 2)", 1, "not expected in an array"),
        ("run ([0]*2)", 1, "needs quotes"),
        ("f() { f; }\nf", 1, "calls nest"),
        ("C='eval $C'\neval $C", 1, "nest more than"),
        ("if true; then " * 60 + "run" + "; fi" * 60, 1, "blocks nest"),
        ("run " + "$((" * 80 + "1" + "))" * 80, 1, "deep"),
        ("run " + "${A:-" * 80 + "1" + "}" * 80, 1, "deep"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_read_says_where(script: str, line: int, why: str):
    with pytest.raises(ScriptError, match=f"line {line}: .*") as caught:
        read(script)
    assert why in str(caught.value)


def test_growth_is_bounded():
    """Doubling a value forty times would need a terabyte."""
    begin = time.process_time()
    with pytest.raises(ScriptError, match="grows beyond"):
        read("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40)
    with pytest.raises(ScriptError, match="grows beyond"):
        read("A=(x)\n" + "A=(${A[@]} ${A[@]})\n" * 40)
    with pytest.raises(ScriptError, match="more than 20,000 commands"):
        read(":\n" * 30_000)
    assert time.process_time() - begin < 20


def test_nothing_is_run(tmp_path: Path):
    """Every way to run a command, in every place of a word."""
    mark = tmp_path / "ran"
    touch = f"touch {mark}"
    script = f"""
    A=$({touch}); B=`{touch}`; C="$({touch})" ; D=$(( $({touch}) + 1 ))
    export E=$({touch}); F=${{X:-$({touch})}}; G=($({touch}) `{touch}`)
    eval "{touch}"; bash -c "{touch}"; sh -c '{touch}'; source <({touch}); . {mark}
    if $({touch}); then {touch}; fi; [ "$({touch})" ] && {touch}; case $({touch}) in *) {touch};; esac
    for i in $({touch}); do {touch}; done; while {touch}; do {touch}; done
    {touch} | {touch} && {touch} || {touch} & ( {touch} ); {{ {touch}; }}
    f() {{ {touch}; }}; f; trap '{touch}' EXIT; PROMPT_COMMAND='{touch}'
    cat <<EOF
$({touch})
EOF
    python pretrain_gpt.py --load "$({touch})" --save "__import__('os').system('{touch}')"; {touch}
    """
    read(script)
    assert not mark.exists()


def test_lost_continuations_are_joined_and_named():
    script = read("N=2\ntorchrun\n--nproc_per_node=$N\npretrain_gpt.py\n--bf16\n--lr 1e-4\nother")
    texts = [item.text for item in script.commands[0].arguments]
    assert texts == ["torchrun", "--nproc_per_node=2", "pretrain_gpt.py", "--bf16", "--lr", "1e-4"]
    assert "lines 3 to 6 begin with a flag" in script.notes[0].text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("-7 / 2", -3),
        ("7 % 4", 3),
        ("2 ** 10", 1024),
        ("A * B", 12),
        ("3 > 2", 1),
        ("1 && 0", 0),
        ("(A > 1) ? 7 : 8", 7),
        ("A < 1 ? 7 : 8", 8),
    ],
)
def test_arithmetic(expression: str, value: int):
    assert evaluate(expression, {"A": "3", "B": "4"}.get) == value


@pytest.mark.parametrize(
    "expression",
    ["1 / 0", "X + 1", "2 ** 1000", "9 ** 63", "1 +", "(1", "1 ? 2", "a = 1", "__import__", "1" * 2000],
)
def test_arithmetic_that_is_not_computed(expression: str):
    with pytest.raises(UnknownNumber):
        evaluate(expression, {}.get)
