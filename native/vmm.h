// Starts a virtual machine monitor: a host program that has a whole guest against it, and so gets nothing of the host but what it must have.
#ifndef DSEC_VMM_H
#define DSEC_VMM_H
int vmm_main(int argc, char **argv);
#endif
