"""Load tokenizers of all kinds as a `Tokenizer`, with exact bytes and exact spelling."""

from xtok.tokenizers._backend import Backend as Backend
from xtok.tokenizers._tokenizer import Encoding as Encoding
from xtok.tokenizers._tokenizer import Tokenizer as Tokenizer
from xtok.tokenizers.library import library_differences as library_differences
from xtok.tokenizers.loading import ModelLike as ModelLike
from xtok.tokenizers.loading import from_transformers as from_transformers
from xtok.tokenizers.loading import load_pair as load_pair
from xtok.tokenizers.loading import load_tokenizer as load_tokenizer
from xtok.tokenizers.model_names import absolute as absolute
from xtok.tokenizers.model_names import model_id as model_id
