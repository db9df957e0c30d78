from tests.models.conftest import highest_precision as highest_precision
