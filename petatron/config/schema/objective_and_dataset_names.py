"""The names of the built-in objective, its loss, and the kinds of datasets, which configuration, models, data, logs and reports share."""

from __future__ import annotations

NEXT_TOKEN = "next-token"
"""The objective of a run that names none."""
LM_LOSS = "lm loss"
"""The loss of the next token; in logs it is the only one that needs no other name beside it."""
GPT_DATASET = "gpt"
"""The kind of dataset of a run whose objective reads text."""
BEST_FIT_DATASET = "best-fit"
"""The kind of dataset that packs the same files without cutting documents that fit."""
BERT_DATASET = "bert"
"""The kind of dataset with masked text: pairs of segments, or packed documents."""
T5_DATASET = "t5"
"""The kind of dataset whose spans are replaced by sentinels, for an encoder and a decoder."""
ITEM_DATASET = "item-histories"
"""The kind of dataset with the items that users had, one after the other."""
IMAGE_TEXT_DATASET = "image-text"
"""The kind of dataset with images and text, for models that read both."""
LABELLED_DATASET = "labelled-text"
"""The kind of dataset with texts and their labels, in files of lines of JSON."""
CLASSIFICATION, REGRESSION, CONTRASTIVE = "classification", "regression", "contrastive"
TASK_OBJECTIVES = (CLASSIFICATION, REGRESSION, CONTRASTIVE)
"""The objectives of models with a task head: a class, numbers, or a place among others, for each text."""
NEXT_ITEM = "next-item"
"""The objective of recommenders: their own losses, and how far up the held-out items are."""
MASKED_DATASETS = (BERT_DATASET, T5_DATASET)
TEXT_DATASETS = (GPT_DATASET, BEST_FIT_DATASET, *MASKED_DATASETS)
"""The kinds that read Megatron's .bin and .idx files."""
EXTERNAL = "external"
"""The `--dataloader-type` whose micro-batches come from a user's code."""
PREFERENCE_DATASET = "preferences"
"""The kind of dataset with pairs of answers to a prompt, the chosen one and the rejected one."""
UNPAIRED_PREFERENCE_DATASET = "unpaired-preferences"
"""The kind of dataset with answers that are desirable or not."""
DPO, ORPO, SIMPO, KTO, REWARD = "dpo", "orpo", "simpo", "kto", "reward"
PREFERENCE_OBJECTIVES = (DPO, ORPO, SIMPO, KTO, REWARD)
"""The objectives that learn from preferences."""
