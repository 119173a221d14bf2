"""A server that translates between trainers that send student ids and a teacher's server."""

from xtok.teachers.serving.service import check_server as check_server
from xtok.teachers.serving.service import serve as serve
