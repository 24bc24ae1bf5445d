"""Megatron's shell scripts and functional-test files as configurations of ours, read without executing anything of them.

`shell_lexer.py` and `shell_parser.py` make commands of a text, `shell_interpreter.py` computes their words from assignments alone, and
`find_launch_command.py` finds the launcher, its ranks and the flags of the training script. What each flag becomes is asked of
`config/flags/` (`port_flags.py`). `ported_run.py` puts it together; `petatron port` prints it.
"""
