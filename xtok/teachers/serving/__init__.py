"""A live teacher with a different tokenizer: a server for trainers that send the student's ids."""

from xtok.teachers.serving.service import check_server as check_server
from xtok.teachers.serving.service import serve as serve
