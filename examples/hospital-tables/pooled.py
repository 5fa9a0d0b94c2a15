"""What scikit-learn reaches on the same patients, with all tables in one place and without privacy.

python pooled.py
"""

from __future__ import annotations

from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import fedspa
from fedspa.runs.setup import records_of

data = records_of(fedspa.load("config.toml"))  # the same patients are held out for testing
model = LogisticRegression(max_iter=5000).fit(data.train_x, data.train_y)
print(f"AUC {roc_auc_score(data.test_y, model.predict_proba(data.test_x)[:, 1]):.4f} of {len(data.test_y):,} stays")
