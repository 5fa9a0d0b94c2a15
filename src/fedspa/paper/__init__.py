"""The paper's evaluation (Hu, Gong and Guo 2021, section 5): Tables 1 and 2, Figure 1, run again and told as found."""
