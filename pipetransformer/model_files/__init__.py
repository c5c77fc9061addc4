"""Write a model's weights for those who come later: other programs, and the end of the run.

model_folder: what from_pretrained loads ◄─ checkpoint_export      best_model: over evaluations
"""

from pipetransformer.model_files.best_model import BEST_FOLDER, BestModel
from pipetransformer.model_files.checkpoint_export import add_export_parser, read_weights
from pipetransformer.model_files.model_folder import DescribedModel, write_model_folder

__all__ = [
    "BEST_FOLDER", "BestModel", "DescribedModel", "add_export_parser", "read_weights",
    "write_model_folder",
]  # fmt: skip
