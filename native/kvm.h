// Does /dev/kvm run a guest's kernel, or only pretend to? Making a virtual machine succeeds on hosts that interpret every instruction of a
// guest's ring 0, where no kernel comes up in a reasonable time; so we ask by executing some.
#ifndef DSEC_KVM_H
#define DSEC_KVM_H
// Prints one line. 0: as fast as the host, 1: there is no KVM that can be used, 3: it interprets
int kvm_main(void);
#endif
