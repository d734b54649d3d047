"""Evaluation suites, and the functions that run them and find their stored results."""

from difftx.evals.evaluation import Evaluation as Evaluation
from difftx.evals.run import check_run as check_run
from difftx.evals.run import evaluate as evaluate
from difftx.evals.run import fields_of as fields_of
from difftx.evals.run import result_path as result_path
from difftx.evals.run import settings_sha256 as settings_sha256
from difftx.evals.run import settings_sha256_by_suite as settings_sha256_by_suite
from difftx.evals.run import stored_result as stored_result
from difftx.evals.run import with_inner as with_inner
