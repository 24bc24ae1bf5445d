"""Sentences: where texts are divided in each language, and what `petatron data preprocess --split-sentences` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.config.schema.data import TokenizerConfig
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.sentences import sentence_splitter
from petatron.data.sentences.language_rules import _languages, language_rules
from petatron.data.sentences.sentence_splitter import SentenceSplitter
from petatron.data.tokenizer import build_tokenizer
from tests.unit.data.megatron_tool import MegatronTool
from tests.unit.data.vocabularies import write_bert_vocabulary

# A bar is a border of sentences, in place of the space there.
CASES = {
    "english": [
        "It rains.|Nobody minds!|Do you?|I do not.",
        "Dr. Ada met Mrs. Lee, i.e. her aunt, at 5 p.m. in St. Albans.|They ate fish, chips, etc. and left.",
        "The U.S. Senate met in the U.S. last year.|It sits in the U.S.|The end came soon.",
        "J. R. R. Smith wrote it.|A. B. Jones did not, and neither did I.|She knew.",
        "See Fig. 3, pp. 4 and vol. IV of it.|The answer is no.|That is modern art.|It costs $3.50 or 1,000.25 at www.example.com today.",
        "On Jan. 3 she left.|She came back in Jan.|The snow had gone.",
        "He sells apples, pears, etc.|Tom buys them from Brown Inc. in York.",
        "Wait... what?|I thought...|No.|Really…|Yes… maybe.",
        "He asked, “Why?” and went.|“Because.”|She said (quietly.) that it rained.|(It did.)|“Go,” he said.",
        "'One.'|'Two.'|\"Three!\"|Four [...] five.|Six.",
        "1. The first thing.|2. The second one.",
        "What?!|No!!|He works at Yahoo! in Rome.",
        "In 1990.|12 people came on the 3rd.",
        "A line that\ngoes on.|– A dash.|- Another.",
    ],
    "german": [
        "Am 3. Oktober kam Hr. Dr. Meier, d. h. z. B. um 5 Uhr.|Er ging am 4. Der Rest blieb.".replace(
            "4. Der", "4.|Der"
        ),
        "„Komm mit!“ sagte sie.|„Nein.“|Ludwig XIV. Bourbon mochte Äpfel usw.|Im 19. Jahrhundert war das bzw. jenes so.|Peter nicht.",
        "Es war 1990.|Ende.",
    ],
    "french": [
        "M. Dupont habite av. Foch, p. ex. au no 5.|« Bonjour ! » dit-il.|Elle dit : « Oui. »|Puis il rit, etc.|Fin.",
        "– Non.|– Oui !|Vraiment ?|Le XIXe s. finit.",
    ],
    "spanish": ["El Sr. Gómez vive en EE.UU. hoy.|¿Quién es?|¡Hola!|«Sí», dijo la Dra. Ruiz, pág. 4.|Fin."],
    "italian": ["Il dott. Rossi, ad es., vive qui, ecc.|Poi il sig. Bianchi parte alle 5.|Perché?|Non so."],
    "portuguese": ["O Sr. Silva e a Dra. Costa moram na Av. Brasil, n. 5.|Quem é?|Não sei."],
    "dutch": ["Dhr. Jansen zei o.a. dat het kon, d.w.z. morgen.|De rest, enz.|Kan dat?|Ja!"],
    "polish": ["Prof. Nowak mieszka przy ul. Polnej, np. w domu nr 5.|To jest to.|Dnia 3. Maja był m.in. on.|Kto?"],
    "czech": ["Pan Novák přišel 3. Května, tj. včera.|To je ono, např. č. 5.|Kdo?|On."],
    "russian": [
        "А. С. Пушкин жил на ул. Мойке, т. е. в г. Петербурге.|Он умер в 1837 г.|Это было зимой, и т.д.|Кто?|«Нет.»|Да!"
    ],
    "turkish": ["Dr. Kaya saat 5'te geldi.|19. Yüzyılda Prof. Demir vb.|Bu iyi mi?|Evet."],
    "swedish": ["Hr. Berg kom bl.a. kl. 5 t.ex. igår.|Det var bra.|Varför?|Nej!"],
    "finnish": ["Prof. Virta tuli 3. Lokakuuta, esim. eilen.|Se oli hyvä.|Miksi?"],
    "greek": ["Ο κ. Παππάς ήρθε, π.χ. χθες.|Τι είναι αυτό;|Δεν ξέρω.|Ναι!"],
    "chinese": [
        "他走了。|她也走了！|真的吗？",
        "他说：“好。”|我笑了。|价格是3.5元。|对吗?|对。",
    ],
    "japanese": ["「行こう。」と彼は言った。|そうだ。|はい！|（終わり。）|次。"],
    "korean": ["그는 갔다.|왜 그랬을까?|몰라!"],
    "hindi in english": ["वह गया।|क्यों?|पता नहीं।"],
}
WITHOUT_SPACE = ("chinese", "japanese")


@pytest.mark.parametrize("language", CASES)
def test_where_sentences_end(language: str):
    splitter = SentenceSplitter(language.split()[-1])
    for case in CASES[language]:
        joint = "" if language in WITHOUT_SPACE else " "
        assert splitter.split(case.replace("|", joint)) == case.split("|")


def test_blank_lines_and_white_space():
    text = "\n \n A title\n\nOne line\nof two.  Three.\r\n\r\nFour \n \t\n"
    assert SentenceSplitter().split(text) == ["A title", "One line\nof two.", "Three.", "Four"]
    kept = SentenceSplitter(keep_newlines=True).split(text)
    assert kept == ["\n \n A title\n\n", "One line\nof two.  ", "Three.\r\n\r\n", "Four \n \t\n"]
    assert SentenceSplitter().split(" \n\n ") == SentenceSplitter().split("") == []


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="ab AZ.!?…\n\t'\"“”«»()[]-–。！」と15éЖ\u00a0\u3000", max_size=60),
    st.sampled_from(["english", "french", "de"]),
)
def test_sentences_are_the_text(text: str, language: str):
    kept = SentenceSplitter(language, keep_newlines=True).split(text)
    assert "".join(kept) == text and all(kept)
    stripped = SentenceSplitter(language).split(text)
    assert stripped == [sentence.strip() for sentence in kept if sentence.strip()]


def test_a_long_text_is_cut_first_as_megatron_cuts_it(monkeypatch: pytest.MonkeyPatch):
    assert sentence_splitter.MAX_CHARS == 1_000_000
    monkeypatch.setattr(sentence_splitter, "MAX_CHARS", 8)
    assert SentenceSplitter().split("One. Two. Three") == ["One.", "Two", ".", "Three"]


@pytest.mark.parametrize("unit", [".", ". ", "\n", "\n ", "!)", "A. ", ". - ", ".'", "。", "a", "「。"])
def test_time_is_linear(unit: str):
    """A quadratic rule would take minutes for these 400,000 characters."""
    assert SentenceSplitter().split(unit * (400_000 // len(unit))) is not None


def test_languages_have_names_and_codes():
    assert (
        language_rules("FR") is language_rules("french") and len({id(rules) for rules in _languages().values()}) == 25
    )
    for rules in _languages().values():
        listed = [rules.never, rules.sometimes, rules.ends, rules.number]
        assert sum(map(len, listed)) == len(frozenset().union(*listed)), "an abbreviation is of one kind"
        assert all(
            word == word.lower() and not word.endswith(".") for words in (*listed, rules.starters) for word in words
        )
    with pytest.raises(
        DataError,
        match=r"--lang klingon has no rules for sentences\. Use one of chinese, czech, danish, dutch, english",
    ):
        language_rules("klingon")


TEXTS = [
    "The item opens. Dr. Items, e.g. open items! “Open?” Read it.",
    "One item\nhere.\n\nA title\n\nThe end",
    "items",
    "Σ. The café (東京). 你好。Item! ",
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text, "other": text[:10] or "x"}) for text in TEXTS]
    lines.append(json.dumps({"text": ["Ready. Sentences", "\t", "Open!"], "other": "Item. Item"}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase", "ByteTokenizer"])
@pytest.mark.parametrize("flags", [(), ("--append-eod",), ("--keep-newlines",), ("--append-eod", "--lang", "de")])
def test_files_are_those_of_megatron_s_tool(corpus: Path, kind: str, flags: tuple[str, ...]):
    """The bytes of its algorithm, with our borders of sentences."""
    vocab = str(write_bert_vocabulary(corpus.parent / "vocab.txt"))
    named = [] if kind == "ByteTokenizer" else ["--vocab-file", vocab]
    prefix = str(corpus.parent / "out")
    common = ["--input", str(corpus), "--output-prefix", prefix, "--workers", "1", "--json-keys", "text", "other"]
    assert main(["data", "preprocess", *common, "--tokenizer-type", kind, *named, "--split-sentences", *flags]) == 0
    config = TokenizerConfig(tokenizer_type=kind, vocab_file=vocab if named else None)  # type: ignore[arg-type]
    splitter = SentenceSplitter("german" if "de" in flags else "english", keep_newlines="--keep-newlines" in flags)
    tool = MegatronTool(tokenizer=build_tokenizer(config), append_eod="--append-eod" in flags, split=splitter.split)
    for key in ("text", "other"):
        index, tokens = tool.files(corpus.read_text().splitlines(), key)
        assert Path(f"{prefix}_{key}_sentence.idx").read_bytes() == index
        assert Path(f"{prefix}_{key}_sentence.bin").read_bytes() == tokens
    assert not list(corpus.parent.glob("*_document.*"))


def test_a_sequence_of_each_sentence_and_a_document_of_each_line(corpus: Path, capsys: pytest.CaptureFixture[str]):
    made = ["data", "preprocess", "--input", str(corpus), "--tokenizer-type", "ByteTokenizer", "--append-eod"]
    prefix = str(corpus.parent / "out")
    assert main([*made, "--output-prefix", prefix, "--split-sentences", "--workers", "1"]) == 0
    assert "5 documents, 14 sentences, " in capsys.readouterr().out
    data = IndexedDataset(f"{prefix}_text_sentence")
    assert data.document_indices.tolist() == [0, 4, 7, 8, 11, 14] and data.num_sequences == 14
    texts = [bytes(data.get(place).astype("u1")).decode(errors="replace") for place in range(data.num_sequences)]
    assert texts[1] == "Dr. Items, e.g. open items!" and [int(data.get(place)[-1]) == 256 for place in (2, 3)] == [
        False,
        True,
    ]
    assert main([*made, "--output-prefix", f"{prefix}2", "--split-sentences", "--workers", "2"]) == 0
    for end in ("bin", "idx"):
        assert Path(f"{prefix}_text_sentence.{end}").read_bytes() == Path(f"{prefix}2_text_sentence.{end}").read_bytes()


def test_flags_of_sentences_that_change_nothing_or_name_nothing(corpus: Path, capsys: pytest.CaptureFixture[str]):
    made = ["data", "preprocess", "--input", str(corpus), "--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    made += ["--output-prefix", str(corpus.parent / "out")]
    assert main([*made, "--split-sentences", "--lang", "klingon"]) == 1
    assert "--lang klingon has no rules for sentences" in capsys.readouterr().err
    assert main([*made, "--keep-newlines", "--lang", "german"]) == 0
    told = capsys.readouterr().err
    assert (
        "note: --keep-newlines has no effect without --split-sentences." in told
        and "note: --lang has no effect" in told
    )
    vocab = write_bert_vocabulary(corpus.parent / "vocab.txt")
    made[4:6] = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocab)]
    assert main([*made, "--overwrite"]) == 0
    assert "BERT's datasets read sentences: --split-sentences." in capsys.readouterr().err
