"""Build small tokenizers of every kind from the text in this file, the same bytes on every run.

The tests use them in place of real ones, and so does the quick start without a network. Each
function writes one tokenizer to the path it is given and returns that path.

    python scripts/small_tokenizers.py --output-dir data/tokenizers/small
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ENGLISH = """\
The lighthouse stands on the last rock before the open sea. It was built in 1872, and for the
first 129 years somebody lived in it. The keeper lit the lamp in the evening, wound the clockwork
every 3 hours, and wrote the weather into the book: the wind, the waves, the ships that passed.
In 2001 the lamp was given a motor, and the keeper moved to the village. Since then the house has
been empty, but the light has not missed a single night.

There are 201 steps from the door to the lamp. Children count them aloud: 1, 2, 3, ... 199, 200,
201. The answer is always 201, although a boy from the mainland once insisted on 202. "You counted
the doorstep," the old keeper told him. "Everybody who doesn't trust the number 201 counts the
doorstep." He wasn't angry; he'd heard it 2010 times, he said, and he'd hear it again.

How far does the light reach? The beam carries 37.5 km in clear air, 12 km in rain, and in thick
fog less than 100 m. The engineers of the 2010s measured it again and found the same numbers, to
within 0.25 percent. They've also learned that the older glass, which was ground by hand in 1871,
scatters less than the glass that replaced it in 1965. What is old isn't always worse, and what is
newer isn't always better; somebody has to measure it.

What the keepers wrote is now in the library. One entry of 20 January reads: "Wind from the north,
201 birds on the gallery, no ships. I'm told that the world has changed. From here I can't see it."

A tide table is the other thing that a village by the sea can't do without. High water today at
6:12 and 18:37, low water at 0:25 and 12:48; tomorrow everything comes about 50 minutes later. The
moon needs 29.5 days, so after two weeks the table begins to look the same, and after 19 years it
really is the same. The old tables from 1982, 1991 and 2010 hang in the school, and the children
have to work out why 1991 + 19 = 2010. Those who know can go home; the others count the steps.
"""

GERMAN = """\
Der Leuchtturm steht auf dem letzten Felsen vor dem offenen Meer. Er wurde im Jahr 1872 gebaut,
und in den ersten 129 Jahren wohnte immer jemand darin. Der Wärter zündete am Abend die Lampe an,
zog alle 3 Stunden das Uhrwerk auf und schrieb das Wetter in das Buch: den Wind, die Wellen, die
Schiffe, die vorüberfuhren. Von der Tür bis zur Lampe sind es genau 201 Stufen; die Größe der
Stufen ist ungleichmäßig, und wer müde ist, zählt leicht eine zu viel. Die Straße zum Dorf wird bei
Flut überschwemmt, deshalb fährt der Bus nur zweimal täglich, um 7:15 Uhr und um 18:40 Uhr.

Was die Wärter geschrieben haben, steht heute in der Bücherei des Dorfes. Die Kinder müssen in der
Schule ausrechnen, wie weit das Licht reicht: bei klarer Luft 37,5 km, bei Regen 12 km, im dichten
Nebel weniger als 100 m. Früher hätte man gesagt, das könne niemand so genau wissen.
"""

FRENCH = """\
Le phare se dresse sur le dernier rocher avant la pleine mer. Il a été construit en 1872, et pendant
les 129 premières années quelqu'un y a vécu. Le gardien allumait la lampe le soir, remontait le
mécanisme toutes les 3 heures et notait le temps dans le livre : le vent, les vagues, les bateaux
qui passaient. De la porte jusqu'à la lampe, il y a 201 marches. Où sont passés les anciens
gardiens ? L'un d'eux, déjà très âgé, habite près de l'église ; il dit qu'il n'a rien oublié.

Ce que les gardiens ont écrit se trouve aujourd'hui à la bibliothèque. Les élèves doivent calculer
jusqu'où porte la lumière : 37,5 km par temps clair, 12 km sous la pluie, moins de 100 m dans la
brume. « C'est là-bas que j'ai été heureux », répète le vieil homme, « même en hiver. »
"""

RUSSIAN = """\
Маяк стоит на последней скале перед открытым морем. Его построили в 1872 году, и первые 129 лет
в нём всегда кто-то жил. Смотритель зажигал лампу вечером, заводил часовой механизм каждые 3 часа
и записывал в книгу погоду: ветер, волны, корабли, которые проходили мимо. От двери до лампы ровно
201 ступень. Дети считают их вслух, и ответ всегда один: 201. Старый смотритель теперь живёт
в деревне, но каждую ночь он смотрит на свет и говорит, что маяк ещё ни разу не погас.

Всё, что писали смотрители, теперь хранится в библиотеке. В школе дети вычисляют, как далеко виден
свет: в ясную погоду на 37,5 км, в дождь на 12 км, в густом тумане меньше чем на 100 м. Раньше
говорили, что этого никто не может знать точно, но теперь это знает каждый.
"""

CHINESE = """\
灯塔站在大海前面的最后一块岩石上。它建于1872年，最初的129年里一直有人住在塔里。
守塔人每天晚上点灯，每3个小时上一次发条，并且在本子上记下天气：风、海浪，还有经过的船。
从门口到灯一共有201级台阶。孩子们大声地数，答案总是201。老守塔人现在住在村子里，
但是每天晚上他都看着灯塔的光。他说，灯塔的光从来没有灭过，大海也从来没有变过。

守塔人写下的东西，现在都在村子的图书馆里。孩子们在学校里要算出灯塔的光能照多远：
天气好的时候是37.5公里，下雨的时候是12公里，大雾的时候不到100米。
老守塔人说，从前没有人知道这些，现在每个孩子都知道。大海没有变，变的是我们。
"""

JAPANESE = """\
灯台は広い海の前の最後の岩の上に立っています。1872年に建てられ、最初の129年間はいつも人が
住んでいました。灯台守は毎晩ランプに火をつけ、3時間ごとにぜんまいを巻き、天気を本に書きました。
風のこと、波のこと、通りすぎる船のこと。入口からランプまでは201段の階段があります。
子どもたちは声を出して数えますが、答えはいつも201です。「ランプの光は一度も消えたことがない」と
年をとった灯台守は言います。

灯台守が書いたものは、今は村の図書館にあります。子どもたちは学校で、灯台の光がどこまで
とどくのかを計算します。晴れた日には37.5キロ、雨の日には12キロ、霧の深い日には100メートルも
とどきません。「昔はだれも知らなかったことを、今は子どもたちが知っています」と言います。
"""

PYTHON = '''\
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Light:
    """A light at a height above the sea, in metres."""

    name: str
    height: float = 201.0

    def horizon(self, radius: float = 6_371_000.0) -> float:
        if self.height <= 0:
            raise ValueError(f"height must be positive, not {self.height!r}")
        return math.sqrt(2 * radius * self.height + self.height**2)


def count_steps(steps: list[int], limit: int = 1000) -> dict[int, int]:
    counts: dict[int, int] = {}
    for index, step in enumerate(steps):
        if index >= limit:
            break
        counts[step] = counts.get(step, 0) + 1
    return counts


def tide_table(first: float, days: int = 14, delay: float = 50 / 60) -> list[tuple[int, float]]:
    """High water for each day, in hours; it comes 50 minutes later every day."""
    return [(day, (first + day * delay) % 24) for day in range(days)]


if __name__ == "__main__":
    for light in [Light("north"), Light("south", height=37.5)]:
        print(light.name, round(light.horizon() / 1000, 2))
\t# a tab, and spaces at the end of the line:\x20\x20\x20
    assert count_steps([1, 2, 2, 201]) == {1: 1, 2: 2, 201: 1}
'''

EMOJI = """\
Weather 🌊🌊🌬️ today, ☀️ tomorrow! Lamp 💡 on, ships ⛵⛵🚢 safe 👍🏽.
The keeper 👩‍🔧 says: 🎉🎉🎉 201 ✅
"""

CORPUS = (ENGLISH, GERMAN, FRENCH, RUSSIAN, CHINESE, JAPANESE, PYTHON, EMOJI)
"""The training text: one document of each kind, about 8 kB in all."""

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
"""The special tokens of a byte-level tokenizer; they follow the trained vocabulary."""

THINK = "<think>"
"""An added token that is not special: text like any other, in one piece."""

CONTROL_SYMBOLS = ("[INST]", "[/INST]")
"""The control symbols of a SentencePiece model, beside `<s>` and `</s>`."""

TIKTOKEN_DIGITS = 3


def split_pattern(digits: int) -> str:
    """The pattern of cl100k and Llama 3, with numerals cut into groups of 1 to `digits`."""
    numeral = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numeral
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def byte_level_bpe(
    folder: Path, *, vocab_size: int, digits: int, normalizer: str | None = None
) -> Path:
    """Write a Hugging Face folder with a byte-level BPE tokenizer, as Llama 3 and Qwen have.

    The last ids are the special tokens and, after them, `<think>`. Encoding a text puts
    `<|begin_of_text|>` before it unless `add_special_tokens=False`. `config.json` gives the model a
    width larger than the tokenizer, `generation_config.json` two end-of-sequence ids.

    Args:
        folder: Made if need be.
        vocab_size: Number of tokens, added ones included.
        digits: The most digits that a token can have.
        normalizer: A Unicode normalization form: "NFC", "NFKC", ...
    """
    trained = _train_bpe(vocab_size - len(SPECIAL_TOKENS) - 1, digits, normalizer)
    trained.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    trained.add_tokens([AddedToken(THINK, normalized=False, special=False)])
    ids = trained.get_vocab()
    bos, eos, _, turn_end, pad = SPECIAL_TOKENS
    _write_hf_folder(
        folder,
        trained,
        special_tokens={"bos_token": bos, "eos_token": eos, "pad_token": pad},
        eos_ids=[ids[eos], ids[turn_end]],
    )
    return folder


def sentencepiece_bpe(path: Path, *, vocab_size: int) -> Path:
    """Write a SentencePiece BPE model with byte fallback, as Llama 2 and Mistral have.

    It adds a dummy prefix, changes nothing else about the text, splits digits, and has
    `<unk> <s> </s>`, then `CONTROL_SYMBOLS`, the user-defined `<think>`, the 256 bytes, the pieces.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # An iterator and a buffer, because the trainer writes the names of files into the model.
        sentence_iterator=iter("".join(CORPUS).splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.98,  # leaves rare characters to the byte fallback
        byte_fallback=True,
        split_digits=True,
        control_symbols=list(CONTROL_SYMBOLS),
        user_defined_symbols=[THINK],
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


def sentencepiece_hf(folder: Path, model_path: Path) -> Path:
    """Write a Hugging Face folder with the same tokenizer as a SentencePiece file.

    Transformers converts it, as it does for Llama 2. The folder holds tokenizer.json and not the
    SentencePiece file, so that nothing but tokenizer.json can be what is loaded. The two encode
    alike, except that a dummy prefix also follows an added token in a text.
    """
    from transformers import LlamaTokenizerFast

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(model_path, Path(scratch) / "tokenizer.model")
        tokenizer = LlamaTokenizerFast.from_pretrained(scratch, legacy=False).backend_tokenizer
    # Llama 2's own normalizer. Metaspace, which newer conversions have in its place, gives no
    # dummy prefix to a text that starts with a space; SentencePiece does.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    _write_hf_folder(
        folder,
        tokenizer,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        eos_ids=[tokenizer.token_to_id("</s>")],
    )
    return folder


def tiktoken_ranks(path: Path, *, vocab_size: int) -> Path:
    """Write a tiktoken file: a line `base64(bytes) rank` each for 256 bytes and the merges.

    The file says nothing of special tokens or of the pattern, which is `tiktoken_pattern()`.
    """
    vocab = _train_bpe(vocab_size, TIKTOKEN_DIGITS).get_vocab()
    byte_of = {char: byte for byte, char in enumerate(_byte_characters())}
    lines = [
        f"{base64.b64encode(bytes(byte_of[char] for char in token)).decode()} {rank}\n"
        for token, rank in sorted(vocab.items(), key=lambda item: item[1])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="ascii", newline="\n")
    return path


def tiktoken_pattern() -> str:
    """The split pattern that the ranks of `tiktoken_ranks` were trained with."""
    return split_pattern(TIKTOKEN_DIGITS)


def write_all(output_dir: Path) -> list[Path]:
    """Write one tokenizer of each kind, under fixed names."""
    model = sentencepiece_bpe(output_dir / "small.model", vocab_size=1000)
    return [
        byte_level_bpe(output_dir / "small-byte-level", vocab_size=1200, digits=1),
        byte_level_bpe(output_dir / "small-digits", vocab_size=800, digits=3),
        model,
        sentencepiece_hf(output_dir / "small-hf", model),
        tiktoken_ranks(output_dir / "small.tiktoken", vocab_size=1000),
    ]


def _train_bpe(vocab_size: int, digits: int, normalizer: str | None = None) -> Tokenizer:
    """A byte-level BPE tokenizer without added tokens; its first ids are the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split_pattern(digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} byte-level tokens, not {vocab_size}"
        )
    return tokenizer


def _write_hf_folder(
    folder: Path, tokenizer: Tokenizer, *, special_tokens: dict[str, str], eos_ids: list[int]
) -> None:
    """Write tokenizer.json and the three small files that stand beside it in a model's folder."""
    bos = special_tokens["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B:1",
        special_tokens=[(bos, tokenizer.get_vocab()[bos])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    width = (tokenizer.get_vocab_size() // 128 + 1) * 128
    _write_json(
        folder / "tokenizer_config.json",
        # The plain class: it takes tokenizer.json as it is, where LlamaTokenizer builds it anew.
        {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens},
    )
    _write_json(folder / "config.json", {"model_type": "llama", "vocab_size": width})
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_ids})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")


def _byte_characters() -> list[str]:
    """The display character of each byte in a byte-level vocabulary (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def main() -> None:
    """Write one tokenizer of each kind and print their paths."""
    default = Path(__file__).resolve().parents[1] / "data" / "tokenizers" / "small"
    parser = argparse.ArgumentParser(description="Build small tokenizers of every kind.")
    parser.add_argument("--output-dir", type=Path, default=default, help="default: %(default)s")
    for path in write_all(parser.parse_args().output_dir):
        print(os.path.relpath(path))


if __name__ == "__main__":
    main()
